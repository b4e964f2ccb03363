//! A peer that sends frames as a test makes them.

#![expect(clippy::unwrap_used, reason = "a connection that ends fails the test")]

use std::io::{Read, Write};
use std::net::TcpStream;

use recstore_ps::codec::{Frame, Header, Kind, Section, read_frame};

use super::cluster::{Cluster, hello};

/// More than any answer.
const LIMIT: u64 = 1 << 30;

/// The bytes of a welcome before its text, and where the text's length stands.
const WELCOME_BYTES: usize = 40;
const TEXT_LENGTH: usize = 12;

/// A connection whose greeting the server has taken.
pub(crate) struct Peer(TcpStream);

impl Peer {
    pub(crate) fn connect(cluster: &Cluster) -> Self {
        let mut stream = TcpStream::connect(cluster.servers[0].address().tcp().unwrap()).unwrap();
        stream.write_all(&hello(3)).unwrap();
        let mut welcome = [0; WELCOME_BYTES];
        stream.read_exact(&mut welcome).unwrap();
        let length = u32::from_le_bytes(std::array::from_fn(|byte| welcome[TEXT_LENGTH + byte]));
        stream.read_exact(&mut vec![0; length as usize]).unwrap();
        Self(stream)
    }

    /// Sends JSON, and returns the JSON of the answer.
    pub(crate) fn ask(&mut self, text: &str) -> String {
        self.send(Kind::Manage, &[Section::Json(text)], 0)
    }

    /// Sends a frame, and returns the JSON of the answer, if it has any.
    pub(crate) fn send(&mut self, kind: Kind, sections: &[Section<'_>], sequence: u64) -> String {
        let header = Header { sequence, table: 1, ..Header::new(kind, 1) };
        Frame { header, sections: sections.to_vec() }.write(&mut self.0).unwrap();
        let answer = read_frame(&mut self.0, LIMIT).unwrap();
        match answer.sections().unwrap()[..] {
            [Section::Json(text)] => text.to_owned(),
            _ => String::new(),
        }
    }
}

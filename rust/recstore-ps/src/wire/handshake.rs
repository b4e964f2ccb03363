//! How a connection to the bulk port begins: who calls, which version both speak, and who answers.
//!
//! The client sends [`Hello`]: the magic, the lowest and the highest version it speaks (u16 each), the length of its
//! token (u32), its number (16 bytes), and the token. The server answers with [`Welcome`]: the magic, the version chosen
//! or 0 for a refusal (u16), two zeros, the length of the refusal's text (u32), what tells this run of the server from
//! others (u64), the most bytes of a frame's body (u64), its shard and of how many (u32 each), and the text. Since version 2
//! the text of a server that does not refuse is what counts of the store, [`StoreMetadata`] in JSON, or `null`; since version 3 it
//! is an object of those `facts` and of the server's `standing`, [`ReplicaRole`].

use std::io::{self, ErrorKind, Read, Write};

use recstore::Shard;
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

use crate::wire::codec::ClientId;
use crate::wire::replica_role::ReplicaRole;
use crate::wire::store_metadata::StoreMetadata;
use crate::wire::token::MAX_TOKEN_BYTES;

const MAGIC: [u8; 8] = *b"RECSTORE";

/// The versions that this program speaks.
pub(crate) const VERSIONS: (u16, u16) = (1, 5);

/// The first version in which a server says what counts of the store.
const WITH_FACTS: u16 = 2;

/// The first version in which a server says whether it leads its shard.
pub(crate) const WITH_STANDING: u16 = 3;

/// The first version in which rows and gradients may go as bfloat16.
pub(crate) const WITH_BFLOAT16: u16 = 3;

/// The first version in which a server says whose steps it made last, so that shards that stopped a step apart are brought
/// together.
pub(crate) const WITH_LEVEL: u16 = 5;

/// The longest token or refusal.
const MAX_TEXT_BYTES: usize = MAX_TOKEN_BYTES;

/// What a client says first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) versions: (u16, u16),
    pub(crate) client: ClientId,
    pub(crate) token: Vec<u8>,
}

/// What a server answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Welcome {
    /// The version both speak, or why there is none.
    pub(crate) version: Result<u16, String>,
    /// Tells this run of the server from others.
    pub(crate) incarnation: u64,
    pub(crate) max_frame_bytes: u64,
    pub(crate) shard: Shard,
    /// What counts of the store; none before a client has said it.
    pub(crate) facts: Option<StoreMetadata>,
    /// Whether the server leads its shard: those that do not refuse clients of older versions.
    pub(crate) standing: ReplicaRole,
}

/// The text of a server that does not refuse.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AcceptedHello {
    facts: Option<StoreMetadata>,
    standing: ReplicaRole,
}

impl AcceptedHello {
    fn read(version: u16, text: &[u8]) -> io::Result<Self> {
        Ok(match version {
            WITH_STANDING.. => serde_json::from_slice(text)?,
            WITH_FACTS => Self { facts: serde_json::from_slice(text)?, ..Self::default() },
            _ => Self::default(),
        })
    }

    fn text(&self, version: u16) -> io::Result<String> {
        Ok(match version {
            WITH_STANDING.. => serde_json::to_string(self)?,
            WITH_FACTS => serde_json::to_string(&self.facts)?,
            _ => String::new(),
        })
    }
}

impl Hello {
    pub(crate) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.versions.0.to_le_bytes());
        bytes.extend(self.versions.1.to_le_bytes());
        bytes.extend((self.token.len() as u32).to_le_bytes());
        bytes.extend(self.client.0.to_le_bytes());
        bytes.extend(&self.token);
        to.write_all(&bytes)
    }

    pub(crate) fn read(from: &mut impl Read) -> io::Result<Self> {
        read_magic(from)?;
        let versions = (u16::from_le_bytes(array(from)?), u16::from_le_bytes(array(from)?));
        let len = u32::from_le_bytes(array(from)?) as usize;
        let client = ClientId(u128::from_le_bytes(array(from)?));
        Ok(Self { versions, client, token: read_text(from, len)? })
    }

    /// Returns the highest version that both speak.
    ///
    /// # Errors
    /// Why there is none, or that the token is another than `token`.
    pub(crate) fn accept(&self, token: Option<&str>) -> Result<u16, String> {
        let (lowest, highest) = self.versions;
        let version = highest.min(VERSIONS.1);
        if version < lowest.max(VERSIONS.0) {
            return Err(format!(
                "the server speaks the versions {} to {} of the protocol, the client {lowest} to {highest}",
                VERSIONS.0, VERSIONS.1
            ));
        }
        // In constant time: how long a refusal takes must not show how much of a token is right.
        match token {
            Some(token) if !bool::from(token.as_bytes().ct_eq(&self.token)) => {
                Err("the token is not the server's".to_owned())
            }
            _ => Ok(version),
        }
    }
}

impl Welcome {
    /// Whether the server says what counts of the store.
    pub(crate) fn tells_facts(&self) -> bool {
        self.version.as_ref().is_ok_and(|&version| version >= WITH_FACTS)
    }

    pub(crate) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let told = || AcceptedHello { facts: self.facts.clone(), standing: self.standing.clone() };
        let text = match &self.version {
            Ok(version) => told().text(*version)?,
            Err(refusal) => refusal.clone(),
        };
        let mut bytes = MAGIC.to_vec();
        // 0 is no version: it says that the text is a refusal.
        bytes.extend(self.version.as_ref().copied().unwrap_or(0).to_le_bytes());
        bytes.extend([0; 2]);
        bytes.extend((text.len() as u32).to_le_bytes());
        bytes.extend(self.incarnation.to_le_bytes());
        bytes.extend(self.max_frame_bytes.to_le_bytes());
        bytes.extend((self.shard.number as u32).to_le_bytes());
        bytes.extend((self.shard.of as u32).to_le_bytes());
        bytes.extend(text.as_bytes());
        to.write_all(&bytes)
    }

    pub(crate) fn read(from: &mut impl Read) -> io::Result<Self> {
        read_magic(from)?;
        let version = u16::from_le_bytes(array(from)?);
        let _: [u8; 2] = array(from)?;
        let len = u32::from_le_bytes(array(from)?) as usize;
        let (incarnation, max_frame_bytes) =
            (u64::from_le_bytes(array(from)?), u64::from_le_bytes(array(from)?));
        let [number, of] = [u32::from_le_bytes(array(from)?), u32::from_le_bytes(array(from)?)];
        let text = read_text(from, len)?;
        let refusal = || String::from_utf8_lossy(&text).into_owned();
        let AcceptedHello { facts, standing } = AcceptedHello::read(version, &text)?;
        Ok(Self {
            version: if version == 0 { Err(refusal()) } else { Ok(version) },
            facts,
            standing,
            incarnation,
            max_frame_bytes,
            shard: Shard { number: number as usize, of: of as usize },
        })
    }
}

fn read_magic(from: &mut impl Read) -> io::Result<()> {
    match array(from)? == MAGIC {
        true => Ok(()),
        false => Err(io::Error::new(ErrorKind::InvalidData, "this is no bulk port of a recstore server")),
    }
}

fn array<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes).map(|()| bytes)
}

fn read_text(from: &mut impl Read, len: usize) -> io::Result<Vec<u8>> {
    // The length is a stranger's word: it is bounded before there is memory for the text.
    if len > MAX_TEXT_BYTES {
        let message = format!("a text of {len} bytes exceeds {MAX_TEXT_BYTES}");
        return Err(io::Error::new(ErrorKind::InvalidData, message));
    }
    let mut text = vec![0; len];
    from.read_exact(&mut text).map(|()| text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::HashMethod;
    use crate::wire::replica_role::Role;

    fn hello(versions: (u16, u16), token: &str) -> Hello {
        Hello { versions, client: ClientId(u128::MAX - 7), token: token.as_bytes().to_vec() }
    }

    fn welcome(version: Result<u16, String>, facts: Option<StoreMetadata>) -> Welcome {
        let shard = Shard { number: 2, of: 3 };
        let standing = ReplicaRole::default();
        Welcome { version, incarnation: 9, max_frame_bytes: 1 << 40, shard, facts, standing }
    }

    #[test]
    fn what_is_said_is_understood() {
        let mut bytes = Vec::new();
        hello((1, 2), "secret").write(&mut bytes).unwrap();
        assert_eq!(Hello::read(&mut &bytes[..]).unwrap(), hello((1, 2), "secret"));
        let facts = Some(StoreMetadata::new(HashMethod::SimpleMod));
        let refused = welcome(Err("no".to_owned()), None);
        for welcome in [welcome(Ok(1), None), welcome(Ok(2), None), welcome(Ok(2), facts.clone()), refused] {
            bytes.clear();
            welcome.write(&mut bytes).unwrap();
            assert_eq!(Welcome::read(&mut &bytes[..]).unwrap(), welcome);
        }
        let standing = ReplicaRole { role: Role::Follower { leader: "a:1".to_owned() }, epoch: 7 };
        let follower = Welcome { standing, ..welcome(Ok(3), facts.clone()) };
        bytes.clear();
        follower.write(&mut bytes).unwrap();
        assert_eq!(Welcome::read(&mut &bytes[..]).unwrap(), follower);
        // Clients of version 1 know nothing of facts.
        bytes.clear();
        welcome(Ok(1), facts).write(&mut bytes).unwrap();
        assert_eq!(Welcome::read(&mut &bytes[..]).unwrap(), welcome(Ok(1), None));
    }

    #[test]
    fn other_versions_and_tokens_are_refused_in_words() {
        assert_eq!(hello((1, 9), "").accept(None), Ok(5));
        assert_eq!(hello((1, 1), "").accept(None), Ok(1));
        assert_eq!(hello((1, 1), "a").accept(Some("a")), Ok(1));
        let versions = hello((6, 9), "").accept(None).unwrap_err();
        assert_eq!(versions, "the server speaks the versions 1 to 5 of the protocol, the client 6 to 9");
        assert!(hello((0, 0), "").accept(None).is_err());
        for token in ["", "b", "ab"] {
            assert_eq!(hello((1, 1), token).accept(Some("a")).unwrap_err(), "the token is not the server's");
        }
    }

    #[test]
    fn other_protocols_and_endless_texts_are_refused() {
        let error = Hello::read(&mut &b"GET / HTTP/1.1\r\n"[..]).unwrap_err();
        assert_eq!(error.to_string(), "this is no bulk port of a recstore server");
        let mut bytes = Vec::new();
        hello((1, 1), "").write(&mut bytes).unwrap();
        bytes[12..16].fill(0xFF);
        assert!(Hello::read(&mut &bytes[..]).unwrap_err().to_string().contains("exceeds 4096"));
    }
}

//! A proxy that spoils the connections between clients and a server.

#![allow(dead_code, reason = "every test file uses some of these")]
#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// What a server says first.
const WELCOME_BYTES: usize = 40;

/// What is done to the bytes of one direction of a connection, once that many have passed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    None,
    Cut(usize),
    Duplicate(usize),
    /// This byte is missing; what follows comes.
    Drop(usize),
    Delay(usize),
}

/// Stands between clients and a server and spoils connections as it is told.
pub(crate) struct Proxy {
    pub(crate) address: String,
    faults: Arc<Mutex<dyn FnMut() -> [Fault; 2] + Send>>,
    pub(crate) connections: Arc<AtomicU64>,
    is_down: Arc<AtomicBool>,
    /// Holds back what clients say, as a slow line does.
    pub(crate) is_slow: Arc<AtomicBool>,
    /// Keeps what a server says after its welcome.
    pub(crate) is_deaf: Arc<AtomicBool>,
}

impl Proxy {
    pub(crate) fn start(server: String, faults: impl FnMut() -> [Fault; 2] + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Self {
            address: listener.local_addr().unwrap().to_string(),
            faults: Arc::new(Mutex::new(faults)),
            connections: Arc::default(),
            is_down: Arc::default(),
            is_slow: Arc::default(),
            is_deaf: Arc::default(),
        };
        let (faults, connections) = (proxy.faults.clone(), proxy.connections.clone());
        let (is_down, is_deaf) = (proxy.is_down.clone(), proxy.is_deaf.clone());
        let is_slow = proxy.is_slow.clone();
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                connections.fetch_add(1, Ordering::Relaxed);
                if is_down.load(Ordering::Relaxed) {
                    continue;
                }
                let Ok(server) = TcpStream::connect(&server) else { continue };
                let [there, back] = (faults.lock().unwrap())();
                pump(&client, &server, there, [&is_down, &Arc::default(), &is_slow]);
                pump(&server, &client, back, [&is_down, &is_deaf, &Arc::default()]);
            }
        });
        proxy
    }

    /// Ends all connections, and those that come.
    pub(crate) fn set_down(&self, is_down: bool) {
        self.is_down.store(is_down, Ordering::Relaxed);
    }
}

fn pump(from: &TcpStream, to: &TcpStream, fault: Fault, flags: [&Arc<AtomicBool>; 3]) {
    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
    let [is_down, is_deaf, is_slow] = flags.map(Arc::clone);
    from.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    thread::spawn(move || {
        let (mut passed, mut buffer) = (0, [0; 1000]);
        while !is_down.load(Ordering::Relaxed) {
            let count = match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
                Err(_) => break,
            };
            while is_slow.load(Ordering::Relaxed) && !is_down.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(5));
            }
            let hits = |place: usize| (passed..passed + count).contains(&place);
            if is_deaf.load(Ordering::Relaxed) && passed >= WELCOME_BYTES {
                break;
            }
            match fault {
                Fault::Cut(place) if hits(place) => {
                    _ = to.write_all(&buffer[..place - passed]);
                    break;
                }
                Fault::Duplicate(place) if hits(place) => {
                    _ = to.write_all(&buffer[..count]);
                    _ = to.write_all(&buffer[place - passed..count]);
                }
                Fault::Drop(place) if hits(place) => {
                    _ = to.write_all(&buffer[..place - passed]);
                    _ = to.write_all(&buffer[place - passed + 1..count]);
                }
                // The delay is followed by an end, so that there is another connection to spoil.
                Fault::Delay(place) if hits(place + 1_500) => break,
                Fault::Delay(place) => {
                    if hits(place) {
                        thread::sleep(Duration::from_millis(30));
                    }
                    _ = to.write_all(&buffer[..count]);
                }
                _ => _ = to.write_all(&buffer[..count]),
            }
            passed += count;
        }
        _ = from.shutdown(Shutdown::Both);
        _ = to.shutdown(Shutdown::Both);
    });
}

/// Numbers that look random: SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB) >> 33) % bound
    }
}

/// Draws a fault within the first `bytes` of a connection.
pub(crate) fn some_fault(random: &mut Random, bytes: u64) -> Fault {
    let place = random.below(bytes) as usize;
    match random.below(5) {
        0..3 => Fault::Cut(place),
        3 => Fault::Duplicate(place),
        _ => Fault::Delay(place),
    }
}

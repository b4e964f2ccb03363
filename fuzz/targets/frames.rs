//! Frames of requests and replies, with checksums that fit.
#![no_main]

use libfuzzer_sys::fuzz_target;
use recstore_fuzz::repair_frame;
use recstore_ps::codec::{Received, Reply, Request, decode};

const LIMIT: u64 = 1 << 20;

fuzz_target!(|bytes: &[u8]| {
    _ = decode(bytes, LIMIT).map(|frame| drop(Request::of(&frame)));
    let mut bytes = bytes.to_vec();
    repair_frame(&mut bytes);
    let Ok(frame) = decode(&bytes, LIMIT).and_then(Received::widened) else { return };
    if let Ok(request) = Request::of(&frame) {
        let again = request.with_frame(frame.header.request, frame.header.sequence, |frame| frame.to_bytes());
        let again = decode(&again.unwrap().unwrap(), LIMIT << 1).unwrap();
        // NaN is not equal to itself.
        assert_eq!(format!("{:?}", Request::of(&again).unwrap()), format!("{request:?}"));
    }
    let number = frame.header.request;
    let Ok(Ok(reply)) = Reply::of(frame, number) else { return };
    _ = (reply.managed().is_ok(), reply.done().is_ok(), reply.count().is_ok(), reply.left().is_ok());
    _ = (reply.ids().is_ok(), reply.rows(&[4]).is_ok(), reply.slot(2).is_ok(), reply.found(1, 2).is_ok());
    _ = reply.changed(&[1, 2]).is_ok();
});

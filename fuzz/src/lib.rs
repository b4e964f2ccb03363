//! What the targets share: checksums made right again, so that a change of a byte comes past them.

use std::fs;
use std::path::{Path, PathBuf};

const FRAME_HEADER: usize = 40;
const RECORD_HEAD: usize = 40;
const TRAILER: usize = 8;

/// Gives a frame the checksums and the length that go with its bytes, as far as it is long enough to have any.
pub fn repair_frame(bytes: &mut [u8]) {
    let Some(body) = bytes.len().checked_sub(FRAME_HEADER + TRAILER) else { return };
    bytes[8..16].copy_from_slice(&(body as u64).to_le_bytes());
    bytes[4..8].fill(0);
    let header = crc32fast::hash(&bytes[..FRAME_HEADER]);
    bytes[4..8].copy_from_slice(&header.to_le_bytes());
    let end = bytes.len() - TRAILER;
    let whole = u64::from(crc32fast::hash(&bytes[..end])) << 32;
    bytes[end..].copy_from_slice(&whole.to_le_bytes());
}

/// Gives the records of a log, and the frames behind them, their checksums.
pub fn repair_log(bytes: &mut [u8]) {
    let mut place = 0;
    while let Some(head) = bytes.get_mut(place..place + RECORD_HEAD) {
        let checksum = crc32fast::hash(&head[..RECORD_HEAD - 4]);
        head[RECORD_HEAD - 4..].copy_from_slice(&checksum.to_le_bytes());
        let following = u64::from_le_bytes(std::array::from_fn(|byte| head[24 + byte]));
        let (kind, begin) = (head[32], place + RECORD_HEAD);
        let length = if matches!(kind, 1 | 3) { following } else { 0 };
        let end = usize::try_from(length).ok().and_then(|length| begin.checked_add(length));
        let Some(frame) = end.and_then(|end| bytes.get_mut(begin..end)) else { return };
        if kind == 1 {
            repair_frame(frame);
        }
        place = begin + frame.len();
    }
}

/// Gives a manifest its checksum, if it has a place for one.
pub fn repair_manifest(text: &mut [u8]) {
    const BEFORE: &[u8] = b"\"checksum\": \"";
    const DIGITS: usize = 8;
    let Some(before) = text.windows(BEFORE.len()).rposition(|part| part == BEFORE) else { return };
    let place = before + BEFORE.len()..before + BEFORE.len() + DIGITS;
    if text.get(place.clone()).is_some() {
        text[place.clone()].fill(b'0');
        let checksum = format!("{:08x}", crc32fast::hash(text));
        text[place].copy_from_slice(checksum.as_bytes());
    }
}

/// Returns a folder of the repository.
pub fn in_repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Copies the files of a folder into another one.
pub fn copy_files(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).expect("a folder of specimens") {
        let path = entry.expect("a specimen").path();
        if path.is_file() {
            fs::copy(&path, to.join(path.file_name().expect("a name"))).expect("a copy");
        }
    }
}

/// Returns the specimens of frames in a file: a name and hexadecimal digits a line.
pub fn recorded_frames(file: &Path) -> Vec<(String, Vec<u8>)> {
    let text = fs::read_to_string(file).expect("specimens of frames");
    let byte = |digits: &[u8]| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok();
    let frame = |line: &str| {
        let (name, digits) = line.rsplit_once(' ')?;
        let bytes = digits.as_bytes().chunks(2).map(byte).collect::<Option<Vec<u8>>>()?;
        Some((name.trim_end_matches(':').to_owned(), bytes))
    };
    text.lines().filter_map(frame).collect()
}

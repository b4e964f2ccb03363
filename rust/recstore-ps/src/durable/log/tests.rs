use super::*;
use crate::wire::codec::Request;
use recstore::TableId;
use std::fs;

fn append(log: &Log, client: u128, id: i64) -> u64 {
    let (ids, request) = ([id], 7);
    let delete = Request::Delete { table: TableId(1), ids: &ids };
    delete.with_frame(request, id as u64, |frame| log.append(ClientId(client), frame, None)).unwrap().unwrap()
}

/// Number, client, and the sequence number of the frame.
type Made = (u64, u128, u64);

/// Opens a log and returns the changes behind `after`.
fn opened(directory: &Path, after: u64) -> Result<(Log, Vec<Made>), LogError> {
    let mut made = Vec::new();
    let log = Log::open(&Directory::open(directory).unwrap(), after, |logged| {
        made.push((logged.number, logged.client.0, logged.frame.header.sequence));
        Ok(())
    })?;
    Ok((log, made))
}

#[test]
fn changes_come_back_in_their_order_but_for_those_taken_back() {
    let directory = tempfile::tempdir().unwrap();
    let (log, made) = opened(directory.path(), 0).unwrap();
    assert_eq!(made, []);
    assert_eq!([append(&log, 1, 10), append(&log, 2, 20)], [1, 2]);
    log.take_back(2).unwrap();
    append(&log, u128::MAX, 30);
    log.wait(3).unwrap();
    drop(log);
    let (log, made) = opened(directory.path(), 0).unwrap();
    assert_eq!(made, [(1, 1, 10), (3, u128::MAX, 30)]);
    assert_eq!(append(&log, 1, 40), 4);
    drop(log);
    assert_eq!(opened(directory.path(), 1).unwrap().1, [(3, u128::MAX, 30), (4, 1, 40)]);
}

#[test]
fn a_change_taken_back_at_the_end_of_a_file_is_not_missed() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = opened(directory.path(), 0).unwrap();
    append(&log, 1, 10);
    append(&log, 1, 20);
    log.take_back(2).unwrap();
    assert_eq!(log.rotate().unwrap(), 2);
    assert_eq!(append(&log, 1, 30), 3);
    log.take_back(3).unwrap();
    drop(log);
    let (log, made) = opened(directory.path(), 0).unwrap();
    assert_eq!(made, [(1, 1, 10)]);
    assert_eq!(append(&log, 1, 40), 4);
    drop(log);
    assert_eq!(opened(directory.path(), 0).unwrap().1, [(1, 1, 10), (4, 1, 40)]);
}

#[test]
fn a_log_cut_anywhere_gives_the_changes_before_and_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = opened(directory.path(), 0).unwrap();
    let ends: Vec<u64> = (0..3)
        .map(|id| {
            append(&log, 1, -1 - id);
            fs::metadata(directory.path().join("0000000000000001.log")).unwrap().len()
        })
        .collect();
    let whole = fs::read(directory.path().join("0000000000000001.log")).unwrap();
    for len in 0..=whole.len() {
        for tail in [0, 5_000] {
            let other = tempfile::tempdir().unwrap();
            let mut bytes = whole[..len].to_vec();
            bytes.resize(if len < 16 { len } else { len + tail }, 0);
            fs::write(other.path().join("0000000000000001.log"), bytes).unwrap();
            let expected = ends.iter().filter(|end| **end <= len as u64).count();
            let (log, made) = opened(other.path(), 0).unwrap();
            assert_eq!(made.len(), expected, "{len}");
            let is_whole = tail == 0 && (len == 16 || ends.contains(&(len as u64)));
            let left_out = log.left_out().map(|end| end.start + end.bytes);
            let there = len as u64 + if len < 16 { 0 } else { tail as u64 };
            assert_eq!(left_out, (!is_whole).then_some(there), "{len}: all that is left out is told");
            append(&log, 1, 99);
            drop(log);
            assert_eq!(opened(other.path(), 0).unwrap().1.len(), expected + 1, "{len}");
        }
    }
}

#[test]
fn a_byte_that_flipped_within_a_log_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = opened(directory.path(), 0).unwrap();
    (0..3).for_each(|id| _ = append(&log, 1, id));
    let path = directory.path().join("0000000000000001.log");
    let whole = fs::read(&path).unwrap();
    let second = whole.len() / 3;
    for place in 0..second {
        let mut bytes = whole.clone();
        bytes[place] ^= 0x40;
        fs::write(&path, bytes).unwrap();
        let error = opened(directory.path(), 0).unwrap_err().to_string();
        assert!(error.starts_with(&path.display().to_string()), "{place}: {error}");
    }
}

#[test]
fn whatever_flips_in_the_last_record_is_left_out_and_told() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = opened(directory.path(), 0).unwrap();
    let path = directory.path().join("0000000000000001.log");
    (0..2).for_each(|id| _ = append(&log, 1, id));
    let start = fs::metadata(&path).unwrap().len();
    append(&log, 1, 2);
    drop(log);
    let whole = fs::read(&path).unwrap();
    for (place, restarts) in (start as usize..whole.len()).flat_map(|place| [(place, 0), (place, 1)]) {
        let mut bytes = whole.clone();
        bytes[place] ^= 0x10;
        fs::write(&path, bytes).unwrap();
        if restarts == 1 {
            // A start that came behind it has made a file without records.
            let empty = directory.path().join("0000000000000004.log");
            fs::write(empty, segment::HEADER).unwrap();
        }
        let (log, made) = opened(directory.path(), 0).unwrap();
        assert_eq!(made.len(), 2, "{place}");
        let left_out = log.left_out().unwrap().clone();
        let found = (&left_out.file[..], left_out.start, left_out.bytes);
        assert_eq!(found, ("0000000000000001.log", start, whole.len() as u64 - start), "{place}");
        assert_eq!(log.lag().unwrap().left_out, left_out.bytes);
        assert_eq!(append(&log, 1, 40), 3);
        drop(log);
        let (log, made) = opened(directory.path(), 0).unwrap();
        assert_eq!((made.len(), log.left_out()), (3, None), "{place}");
        let noted = LeftOut::read(&Directory::open(directory.path()).unwrap()).unwrap();
        assert_eq!(noted, Some(left_out), "the next start still tells it");
        drop(log);
        remove_segments(&Directory::open(directory.path()).unwrap()).unwrap();
    }
}

#[test]
fn a_flipped_head_of_room_loses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = opened(directory.path(), 0).unwrap();
    append(&log, 1, 10);
    let path = directory.path().join("0000000000000001.log");
    let start = fs::metadata(&path).unwrap().len() as usize;
    large(&log, 20, |frame, staged| _ = log.append(ClientId(1), frame, staged).unwrap());
    drop(log);
    let whole = fs::read(&path).unwrap();
    for place in start..start + record::HEAD_BYTES {
        let mut bytes = whole.clone();
        bytes[place] ^= 0x10;
        fs::write(&path, bytes).unwrap();
        let (log, made) = opened(directory.path(), 0).unwrap();
        assert_eq!((made.len(), log.left_out()), (2, None), "{place}");
    }
}

#[test]
fn files_go_when_a_checkpoint_has_their_changes() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = opened(directory.path(), 0).unwrap();
    for round in 0..3 {
        append(&log, 1, round * 2);
        append(&log, 1, round * 2 + 1);
        assert_eq!(log.rotate().unwrap(), 2 * round as u64 + 2);
        assert_eq!(log.rotate().unwrap(), 2 * round as u64 + 2);
    }
    assert_eq!(segments(&Directory::open(directory.path()).unwrap()).unwrap().len(), 4);
    log.trim(5).unwrap();
    drop(log);
    assert_eq!(opened(directory.path(), 4).unwrap().1, [(5, 1, 4), (6, 1, 5)]);
    let error = opened(directory.path(), 2).unwrap_err().to_string();
    assert!(error.ends_with("the changes from 3 on are missing before it"), "{error}");
}

#[test]
fn threads_wait_for_the_disk_together() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = opened(directory.path(), 0).unwrap();
    std::thread::scope(|scope| {
        for client in 0..4 {
            let log = &log;
            scope.spawn(move || (0..25).for_each(|id| log.wait(append(log, client, id)).unwrap()));
        }
    });
    drop(log);
    assert_eq!(opened(directory.path(), 0).unwrap().1.len(), 100);
}

/// A frame that is worth staging.
fn large(log: &Log, sequence: u64, end: impl FnOnce(&Frame<'_>, Option<Staged>)) {
    let ids: Vec<i64> = (0..LARGE_BYTES as i64 / 8).collect();
    let delete = Request::Delete { table: TableId(1), ids: &ids };
    let written = delete.with_frame(7, sequence, |frame| {
        let mut staged = log.stage(frame.bytes() as u64);
        frame.write(staged.as_mut().unwrap()).unwrap();
        end(frame, staged);
    });
    written.unwrap();
}

#[test]
fn frames_written_while_they_came_come_back_in_the_order_of_their_changes() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = opened(directory.path(), 0).unwrap();
    large(&log, 10, |first, staged| {
        // Others come and go before the first is whole.
        append(&log, 2, 20);
        large(&log, 30, |frame, staged| _ = log.append(ClientId(3), frame, staged).unwrap());
        large(&log, 40, |_, staged| drop(staged));
        assert_eq!(log.append(ClientId(1), first, staged).unwrap(), 3);
    });
    log.wait(3).unwrap();
    let bytes = log.lag().unwrap().bytes;
    assert!((3 * LARGE_BYTES..4 * LARGE_BYTES).contains(&bytes), "{bytes}: a frame was written twice");
    drop(log);
    let (log, made) = opened(directory.path(), 0).unwrap();
    assert_eq!(made, [(1, 2, 20), (2, 3, 30), (3, 1, 10)]);
    append(&log, 1, 50);
    drop(log);
    assert_eq!(opened(directory.path(), 2).unwrap().1, [(3, 1, 10), (4, 1, 50)]);
}

#[test]
fn a_frame_staged_before_the_next_file_or_in_part_is_written_again() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = opened(directory.path(), 0).unwrap();
    append(&log, 1, 5);
    large(&log, 10, |frame, staged| {
        assert_eq!(log.rotate().unwrap(), 1);
        log.append(ClientId(1), frame, staged).unwrap();
        let partly = log.stage(frame.bytes() as u64 + 1);
        log.append(ClientId(1), frame, partly).unwrap();
    });
    drop(log);
    assert_eq!(opened(directory.path(), 0).unwrap().1, [(1, 1, 5), (2, 1, 10), (3, 1, 10)]);
}

#[test]
fn a_frame_that_was_coming_at_the_end_counts_nowhere() {
    let directory = tempfile::tempdir().unwrap();
    let (log, _) = opened(directory.path(), 0).unwrap();
    append(&log, 1, 10);
    let path = directory.path().join("0000000000000001.log");
    let before = fs::metadata(&path).unwrap().len();
    large(&log, 20, |frame, staged| _ = log.append(ClientId(1), frame, staged).unwrap());
    drop(log);
    let whole = fs::read(&path).unwrap();
    let kept = |bytes: &[u8]| {
        let other = tempfile::tempdir().unwrap();
        fs::write(other.path().join("0000000000000001.log"), bytes).unwrap();
        opened(other.path(), 0)
            .map(|(log, made)| (made.len(), log.left_out().map(|end| (end.start, end.bytes))))
    };
    assert_eq!(kept(&whole).unwrap(), (2, None));
    // In the head of the room, in the room, at its end, in the record that refers to it.
    for len in [before + 7, before + 40, before + 50_000, whole.len() as u64 - 40, whole.len() as u64 - 1] {
        let record = whole.len() as u64 - record::HEAD_BYTES as u64;
        let start = if len > record { record } else { before };
        let left_out = Some((start, len - start));
        assert_eq!(kept(&whole[..len as usize]).unwrap(), (1, left_out), "{len}");
    }
    // What a crash left of a frame that nobody was told of, and what it cannot have left.
    let mut flipped = whole.clone();
    flipped[before as usize + 50_000] ^= 1;
    assert_eq!(kept(&flipped).unwrap().0, 1);
    let another = [&flipped[..], &whole[16..before as usize]].concat();
    let error = kept(&another).unwrap_err().to_string();
    assert!(error.contains("damaged behind its first"), "{error}");
}

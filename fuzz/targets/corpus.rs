//! Writes what the fuzzing of each target begins with, from the specimens of the tests: `corpus FOLDER`.

use std::fs;
use std::path::Path;

use recstore::{EmbeddingStore, Encoding, FrozenSpec, LocalStore, SaveOptions, Serial, TableConfig, freeze};
use recstore_fuzz::{copy_files, in_repository, recorded_frames};

const FRAMES: &str = "rust/recstore-ps/tests/fixtures/frames_v";
const FRAME_VERSIONS: std::ops::RangeInclusive<u32> = 1..=3;
const LOGS: &str = "rust/recstore-ps/tests/fixtures/log_v1";
const CHECKPOINTS: &str = "rust/recstore/tests/fixtures/checkpoint_v1";
const GRAPH: &str = r#"{"state": ["weight"], "inputs": 1, "calls": [["aten::mul.Tensor", [{"value": 0}, {"value": 1}], {}],
    ["aten::sum.dim_IntList", [{"value": 2}, [1]], {"dtype": {"dtype": "float32"}}]], "outputs": [{"value": 3}]}"#;

fn main() {
    let folder = std::env::args().nth(1).expect("corpus FOLDER");
    let begin = |target: &str| {
        let folder = Path::new(&folder).join(target);
        fs::create_dir_all(&folder).expect("a folder");
        folder
    };
    write_frames(&begin("frames"), &begin("json"));
    for name in ["changes", "workers", "bounded"] {
        copy_files(&in_repository(&format!("{LOGS}/{name}/log")), &begin("log"));
    }
    for name in ["chain", "shards", "own"] {
        let specimen = in_repository(&format!("{CHECKPOINTS}/{name}"));
        fs::copy(specimen.join("manifest.json"), begin("manifest").join(name)).expect("a copy");
    }
    write_tables(&begin("table_file"), &begin("frozen"));
    fs::write(begin("graph").join("small"), GRAPH).expect("a file");
}

/// The frames, and the JSON in them.
fn write_frames(frames: &Path, json: &Path) {
    for version in FRAME_VERSIONS {
        for file in ["requests.txt", "replies.txt"] {
            let path = in_repository(&format!("{FRAMES}{version}/{file}"));
            for (name, bytes) in recorded_frames(&path) {
                let name = format!("{version}-{file}-{name}");
                if let Some(text) = first_json(&bytes) {
                    fs::write(json.join(&name), text).expect("a file");
                }
                fs::write(frames.join(&name), bytes).expect("a file");
            }
        }
    }
}

/// Returns the text of a frame whose first section is JSON.
fn first_json(frame: &[u8]) -> Option<&[u8]> {
    const BEGIN: usize = 56;
    let length = u64::from_le_bytes(*frame.get(BEGIN - 8..BEGIN)?.first_chunk()?) as usize;
    frame.get(BEGIN..BEGIN + length).filter(|_| frame[BEGIN - 16] == 4)
}

/// Files of a small table: of a checkpoint, and frozen.
fn write_tables(checkpoint: &Path, frozen: &Path) {
    let config = r#"{"optimizer": {"kind": "adam", "bias_correction": "row"}, "eviction": {"ttl": 9},
        "admission": {"kind": "count", "threshold": 2, "shared_rows": 3}}"#;
    let (directory, store) = (tempfile::tempdir().expect("a folder"), LocalStore::new(Box::new(Serial)));
    let config = TableConfig::from_json(2, config).expect("a configuration");
    let table = store.open_table("t", &config).expect("a table");
    table.write(&[1, -2, 3], &[1.0; 6]).expect("rows");
    store.save(directory.path(), &SaveOptions::default()).expect("a save");
    copy_files(directory.path(), checkpoint);
    fs::remove_file(checkpoint.join("manifest.json")).expect("a manifest");
    // A table with shared rows cannot be frozen.
    let config = TableConfig::new(2);
    for encoding in [Encoding::Float32, Encoding::Float16, Encoding::Int8, Encoding::Int4] {
        // Side by side, near, and far apart: each kind of index.
        for (kind, ids) in [[1, 2, 3], [1, -2, 3], [1, 1 << 40, 3]].iter().enumerate() {
            let spec = FrozenSpec { name: "t", config: &config, encoding };
            let read = |_: &[i64], rows: &mut [f32]| {
                rows.fill(0.5);
                Ok(())
            };
            freeze(&frozen.join(format!("{encoding:?}{kind}")), spec, ids, read).expect("a frozen table");
        }
    }
}

//! Two copies of the servers of one store, and other stores, save to and load from the same places in any order: a snapshot
//! is dropped only by who has it, and nobody is locked out of its own.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

mod groups;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use groups::{Group, another_saves, fill, manifest};
use proptest::prelude::*;
use serde_json::Value;

#[derive(Debug, Clone)]
enum Op {
    Save {
        group: usize,
        place: usize,
        replace: bool,
    },
    Load {
        group: usize,
        place: usize,
    },
    Restart {
        group: usize,
        saves: bool,
    },
    /// Keeps a copy of a group's directories.
    Copy {
        group: usize,
    },
    /// A group goes on with the copy: an older state of its own, or another one's.
    Restore {
        group: usize,
    },
    Another {
        place: usize,
        loads: bool,
    },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let (group, place) = (0..2_usize, 0..2_usize);
    let op = prop_oneof![
        8 => (group.clone(), place.clone(), prop::bool::weighted(0.1))
            .prop_map(|(group, place, replace)| Op::Save { group, place, replace }),
        2 => (group.clone(), place.clone()).prop_map(|(group, place)| Op::Load { group, place }),
        3 => (group.clone(), any::<bool>()).prop_map(|(group, saves)| Op::Restart { group, saves }),
        2 => group.clone().prop_map(|group| Op::Copy { group }),
        2 => group.prop_map(|group| Op::Restore { group }),
        2 => (place, prop::bool::weighted(0.7)).prop_map(|(place, loads)| Op::Another { place, loads }),
    ];
    prop::collection::vec(op, 4..24)
}

/// What a group of servers has saved and loaded; a copy of its directories has the same.
#[derive(Clone, Default)]
struct Known {
    snapshots: BTreeSet<String>,
    /// Those too that were known to the store which saved what it loaded.
    heard_of: BTreeSet<String>,
    lineages: BTreeSet<String>,
}

impl Known {
    fn add(&mut self, snapshot: &str, place: &Path) {
        self.snapshots.insert(snapshot.to_owned());
        self.heard_of.insert(snapshot.to_owned());
        let manifest = manifest(place);
        let found = manifest["snapshots"].as_array().unwrap().iter().find(|found| found["id"] == snapshot);
        self.lineages.insert(text(&found.unwrap()["lineage"]["id"]));
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

/// Two groups of one number, the one a copy of the other, and stores that have none.
struct Model {
    root: tempfile::TempDir,
    groups: [(Group, Known); 2],
    copy: (PathBuf, Known),
    copies: usize,
    /// What was known to the store that saved a snapshot.
    saved_with: BTreeMap<String, BTreeSet<String>>,
    /// The snapshots that were saved under the number.
    numbered: BTreeSet<String>,
}

impl Model {
    fn new(of: usize) -> Self {
        let root = tempfile::tempdir().unwrap();
        let directory = |name: &str| root.path().join(name);
        let first = Group::start(&directory("0"), of);
        fill(&first.client(), 1);
        first.copy(&directory("1"));
        first.copy(&directory("copy-0"));
        let groups = [first, Group::start(&directory("1"), of)].map(|group| (group, Known::default()));
        let copy = (directory("copy-0"), Known::default());
        Self { groups, copy, copies: 0, saved_with: BTreeMap::new(), numbered: BTreeSet::new(), root }
    }

    fn act(&mut self, op: &Op) {
        let place = |place: usize| self.root.path().join(format!("place-{place}"));
        match *op {
            Op::Save { group, place: number, replace } => self.save(group, &place(number), replace),
            Op::Load { group, place: number } => {
                let place = place(number);
                if manifest(&place).is_null() {
                    return;
                }
                let (group, known) = &mut self.groups[group];
                let loaded = group.load(&place);
                known.add(&loaded, &place);
                known.heard_of.extend(self.saved_with[&loaded].clone());
            }
            Op::Restart { group, saves } => self.groups[group].0.restart(saves),
            Op::Copy { group } => {
                self.copies += 1;
                let (group, known) = &self.groups[group];
                self.copy = (self.root.path().join(format!("copy-{}", self.copies)), known.clone());
                group.copy(&self.copy.0);
            }
            Op::Restore { group } => {
                self.groups[group].0.restore(&self.copy.0);
                self.groups[group].1 = self.copy.1.clone();
            }
            Op::Another { place: number, loads } => {
                let place = place(number);
                let newest = newest(&place);
                if let Ok(saved) = another_saves(&place, loads && newest.is_some()) {
                    let loaded = newest.filter(|_| loads).into_iter();
                    let known = loaded.flat_map(|loaded| [self.saved_with[&loaded].clone(), [loaded].into()]);
                    self.saved_with.insert(saved.clone(), known.flatten().chain([saved]).collect());
                }
            }
        }
    }

    fn save(&mut self, group: usize, place: &Path, replace: bool) {
        let before = manifest(place);
        let newest = newest(place);
        let (group, known) = &mut self.groups[group];
        let outcome = group.save_with(place, replace);
        let lineages = |key: &str| before[key].as_array().cloned().unwrap_or_default();
        let here =
            lineages("snapshots").iter().map(|found| text(&found["lineage"]["id"])).collect::<BTreeSet<_>>();
        let ended = lineages("ended").iter().map(text).collect::<BTreeSet<_>>();
        let was_part = known.lineages.iter().any(|own| here.contains(own) || ended.contains(own));
        let has = |names: &BTreeSet<String>| newest.as_ref().is_none_or(|newest| names.contains(newest));
        match &outcome {
            Ok((_, None)) => {
                assert!(replace || has(&known.heard_of), "{newest:?} is dropped by who lacks it")
            }
            Ok((_, Some(kept))) => {
                assert!(!was_part && !has(&known.snapshots), "it was part of the place");
                assert!(newest.as_ref() == Some(kept) && !self.numbered.contains(kept));
            }
            Err(refused) => {
                assert!(!replace && !has(&known.snapshots), "locked out of its own: {refused}");
                let named = newest.as_ref().is_some_and(|newest| refused.contains(newest));
                assert!(named && manifest(place) == before, "{refused}");
                let is_copy = refused.contains("a later state or a copy of this store");
                assert_eq!(
                    is_copy,
                    newest.is_some_and(|newest| self.numbered.contains(&newest)),
                    "{refused}"
                );
                assert!(is_copy || was_part || refused.contains("two other stores already"), "{refused}");
            }
        }
        if let Ok((saved, _)) = outcome {
            known.add(&saved, place);
            self.saved_with.insert(saved.clone(), known.heard_of.clone());
            self.numbered.insert(saved);
        }
    }
}

fn newest(place: &Path) -> Option<String> {
    let manifest = manifest(place);
    Some(text(&manifest["snapshots"].as_array()?.last()?["id"]))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]
    #[test]
    fn after_any_sequence_a_snapshot_is_dropped_only_by_who_has_it(of in 1..3_usize, ops in ops()) {
        let mut model = Model::new(of);
        ops.iter().for_each(|op| model.act(op));
    }
}

/// Twelve sequences, unless the environment asks for more.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(12)
}

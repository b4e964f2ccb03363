//! Which of the servers of a shard leads it, and what its changes are part of.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a server is to its shard.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Role {
    /// It answers clients.
    #[default]
    Leader,
    /// It copies another server, and answers clients once it was promoted.
    Follower {
        /// The bulk port of that server, `host:port`.
        leader: String,
    },
    /// It led until another server was promoted.
    Demoted,
}

/// A server's role, and since which promotion.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplicaRole {
    /// The role.
    pub role: Role,
    /// How often another server of the shard was promoted, as far as this one knows.
    pub epoch: u64,
}

impl ReplicaRole {
    /// Whether the server answers clients.
    pub fn leads(&self) -> bool {
        self.role == Role::Leader
    }
}

impl fmt::Display for ReplicaRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.role {
            Role::Leader => write!(f, "it leads its shard in epoch {}", self.epoch),
            Role::Follower { leader } => {
                write!(f, "it follows the server at {leader} until it is promoted (`recstore promote`)")
            }
            Role::Demoted => write!(
                f,
                "another server leads its shard since epoch {}: start it anew with --follow",
                self.epoch
            ),
        }
    }
}

/// The changes that one server made while it led: those from a number on, up to the next run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Tells it from all others: sixteen hexadecimal digits.
    pub run: String,
    /// The number of its first change.
    pub first: u64,
    /// Whether that one is a load of tables, which no log tells.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub loaded: bool,
}

/// Where a follower is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// The run of its last change; none if it has none, or nobody knows.
    pub run: Option<String>,
    /// The number of its last change.
    pub last: u64,
}

impl Position {
    /// Returns the position behind change `last` of these runs.
    pub(crate) fn behind(runs: &[Run], last: u64) -> Self {
        let run = runs.iter().rev().find(|run| run.first <= last);
        Self { run: run.map(|run| run.run.clone()), last }
    }

    /// Whether a server with these runs has all changes up to here too, and needs nothing but its log to go on.
    pub(crate) fn is_within(&self, runs: &[Run]) -> bool {
        let own = |run: &&Run| Some(&run.run) == self.run.as_ref();
        let behind = match runs.iter().position(|run| own(&run)) {
            Some(place) => &runs[place + 1..],
            None if self.last == 0 => runs,
            None => return false,
        };
        behind.iter().all(|run| run.first > self.last && !run.loaded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs() -> Vec<Run> {
        let run = |run: &str, first, loaded| Run { run: run.to_owned(), first, loaded };
        vec![run("a", 1, false), run("b", 81, false), run("c", 101, false)]
    }

    fn at(run: Option<&str>, last: u64) -> Position {
        Position { run: run.map(str::to_owned), last }
    }

    #[test]
    fn a_follower_goes_on_where_both_have_the_same_changes() {
        for (position, expected) in [
            (at(None, 0), true),
            (at(None, 5), false),
            (at(Some("a"), 80), true),
            (at(Some("a"), 81), false),
            (at(Some("b"), 100), true),
            (at(Some("b"), 101), false),
            (at(Some("c"), 1_000), true),
            (at(Some("x"), 5), false),
        ] {
            assert_eq!(position.is_within(&runs()), expected, "{position:?}");
        }
        let loaded = [runs(), vec![Run { run: "d".to_owned(), first: 201, loaded: true }]].concat();
        assert!(!at(Some("c"), 200).is_within(&loaded) && !at(None, 0).is_within(&loaded));
        // Who has copied the tables behind the load has no later change yet.
        assert!(Position::behind(&loaded, 201).is_within(&loaded));
    }

    #[test]
    fn a_position_names_the_run_of_its_last_change() {
        for (last, run) in [(0, None), (1, Some("a")), (80, Some("a")), (81, Some("b")), (500, Some("c"))] {
            assert_eq!(Position::behind(&runs(), last), at(run, last));
        }
    }
}

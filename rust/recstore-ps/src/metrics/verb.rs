//! What requests are called in metrics and log lines, and how many rows they are about.

use crate::wire::codec::{Management, Request};

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Read,
    Write,
    Update,
    Lookup,
    Delete,
    Slot,
    Ids,
    OpenTable,
    FindTable,
    DropTable,
    TableNames,
    Describe,
    Clear,
    Evict,
    NumRows,
    SetLearningRate,
    Statistics,
    SavePart,
    Commit,
    Load,
    Join,
    Beat,
    Leave,
    Barrier,
    Workers,
    Agree,
    Follow,
    Confirm,
    Promote,
    StandDown,
    Narrow,
    AttachSegment,
    Checkpoint,
    BeginPublication,
    TakeChanges,
    EndPublication,
    CountSteps,
    Steps,
}

/// All verbs, each at the place that its number says, and what they are called.
pub(super) const VERBS: [(Verb, &str); 38] = [
    (Verb::Read, "read"),
    (Verb::Write, "write"),
    (Verb::Update, "update"),
    (Verb::Lookup, "lookup"),
    (Verb::Delete, "delete"),
    (Verb::Slot, "slot"),
    (Verb::Ids, "ids"),
    (Verb::OpenTable, "open_table"),
    (Verb::FindTable, "find_table"),
    (Verb::DropTable, "drop_table"),
    (Verb::TableNames, "table_names"),
    (Verb::Describe, "describe"),
    (Verb::Clear, "clear"),
    (Verb::Evict, "evict"),
    (Verb::NumRows, "num_rows"),
    (Verb::SetLearningRate, "set_learning_rate"),
    (Verb::Statistics, "statistics"),
    (Verb::SavePart, "save_part"),
    (Verb::Commit, "commit"),
    (Verb::Load, "load"),
    (Verb::Join, "join"),
    (Verb::Beat, "beat"),
    (Verb::Leave, "leave"),
    (Verb::Barrier, "barrier"),
    (Verb::Workers, "workers"),
    (Verb::Agree, "agree"),
    (Verb::Follow, "follow"),
    (Verb::Confirm, "confirm"),
    (Verb::Promote, "promote"),
    (Verb::StandDown, "stand_down"),
    (Verb::Narrow, "narrow"),
    (Verb::AttachSegment, "attach_segment"),
    (Verb::Checkpoint, "checkpoint"),
    (Verb::BeginPublication, "begin_publication"),
    (Verb::TakeChanges, "take_changes"),
    (Verb::EndPublication, "end_publication"),
    (Verb::CountSteps, "count_steps"),
    (Verb::Steps, "steps"),
];

impl Verb {
    pub(super) fn of(request: &Request<'_>) -> Self {
        match request {
            Request::Manage(management) => Self::of_management(management),
            Request::Read(_) => Self::Read,
            Request::Write { .. } => Self::Write,
            Request::Update(_) | Request::Round { .. } => Self::Update,
            Request::Lookup { .. } => Self::Lookup,
            Request::Delete { .. } => Self::Delete,
            Request::Slot { .. } => Self::Slot,
            Request::Ids { .. } => Self::Ids,
        }
    }

    fn of_management(management: &Management) -> Self {
        match management {
            Management::OpenTable { .. } => Self::OpenTable,
            Management::FindTable { .. } => Self::FindTable,
            Management::DropTable { .. } => Self::DropTable,
            Management::TableNames {} => Self::TableNames,
            Management::Describe { .. } => Self::Describe,
            Management::Clear { .. } => Self::Clear,
            Management::Evict { .. } => Self::Evict,
            Management::NumRows { .. } => Self::NumRows,
            Management::SetLearningRate { .. } => Self::SetLearningRate,
            Management::Statistics { .. } => Self::Statistics,
            Management::SavePart(_) => Self::SavePart,
            Management::Commit(_) => Self::Commit,
            Management::Load(_) => Self::Load,
            Management::Join { .. } => Self::Join,
            Management::Beat { .. } => Self::Beat,
            Management::Leave {} => Self::Leave,
            Management::Barrier { .. } => Self::Barrier,
            Management::Workers {} => Self::Workers,
            Management::Agree { .. } => Self::Agree,
            Management::Follow(_) => Self::Follow,
            Management::Confirm { .. } => Self::Confirm,
            Management::Promote {} => Self::Promote,
            Management::StandDown { .. } => Self::StandDown,
            Management::Narrow {} => Self::Narrow,
            Management::AttachSegment {} => Self::AttachSegment,
            Management::Checkpoint {} => Self::Checkpoint,
            Management::BeginPublication { .. } => Self::BeginPublication,
            Management::TakeChanges(_) => Self::TakeChanges,
            Management::EndPublication { .. } => Self::EndPublication,
            Management::CountSteps { .. } => Self::CountSteps,
            Management::Steps { .. } => Self::Steps,
        }
    }

    pub(super) fn name(self) -> &'static str {
        VERBS[self as usize].1
    }

    /// Whether requests name rows by their ids.
    pub(super) fn has_rows(self) -> bool {
        matches!(self, Self::Read | Self::Write | Self::Update | Self::Lookup | Self::Delete | Self::Slot)
    }
}

/// Returns how many ids a request names.
pub(super) fn rows_of(request: &Request<'_>) -> usize {
    match request {
        Request::Read(reads) => reads.iter().map(|read| read.ids.len()).sum(),
        Request::Update(updates) | Request::Round { updates, .. } => {
            updates.iter().map(|update| update.ids.len()).sum()
        }
        Request::Write { ids, .. }
        | Request::Lookup { ids, .. }
        | Request::Delete { ids, .. }
        | Request::Slot { ids, .. } => ids.len(),
        Request::Manage(_) | Request::Ids { .. } => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_verb_is_at_its_place_under_a_name_of_its_own() {
        for (place, (verb, name)) in VERBS.iter().enumerate() {
            assert_eq!((*verb as usize, verb.name()), (place, *name));
            assert_eq!(VERBS.iter().filter(|(_, other)| other == name).count(), 1, "{name}");
        }
    }
}

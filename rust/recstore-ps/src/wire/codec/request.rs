//! A request as a value, and as a frame.

use recstore::{Step, TableId};

use super::client_id::ClientId;
use super::frame::{Frame, Header, Kind, Received};
use super::frame_error::{FrameError, malformed, parse};
use super::management::Management;
use super::section::{Section, unexpected};

/// What a client asks of a server.
#[expect(clippy::large_enum_variant, reason = "there is one at a time for each connection")]
#[derive(Debug, Clone, PartialEq)]
pub enum Request<'a> {
    /// About tables as a whole.
    Manage(Management),
    /// The rows of ids, of several tables.
    Read(Vec<TableIds<'a>>),
    /// Overwrites the rows of ids.
    Write {
        /// The table.
        table: TableId,
        /// The ids.
        ids: &'a [i64],
        /// A row for each.
        rows: &'a [f32],
    },
    /// Optimizer steps, all or none.
    Update(Vec<MergedUpdate<'a>>),
    /// Indices and rows of ids.
    Lookup {
        /// The table.
        table: TableId,
        /// The ids.
        ids: &'a [i64],
        /// Whether ids without a row get one.
        insert: bool,
    },
    /// Deletes the rows of ids.
    Delete {
        /// The table.
        table: TableId,
        /// The ids.
        ids: &'a [i64],
    },
    /// All ids of a table.
    Ids {
        /// The table.
        table: TableId,
    },
    /// Values of an optimizer's slot.
    Slot {
        /// The table.
        table: TableId,
        /// The slot's name.
        slot: String,
        /// The ids.
        ids: &'a [i64],
    },
    /// A step that several clients make together. A server writes it to its log and takes it from nobody.
    Round {
        /// The clients, and which of their changes it is.
        members: Vec<RoundMember>,
        /// Their updates: for each step, one of each client, in their order.
        updates: Vec<MergedUpdate<'a>>,
    },
}

/// A client's part in a step of several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundMember {
    /// The client.
    pub client: ClientId,
    /// The number of its change.
    pub sequence: u64,
}

/// Ids of a table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TableIds<'a> {
    /// The table.
    pub table: TableId,
    /// The ids.
    pub ids: &'a [i64],
}

/// One optimizer step of a table, the gradients of equal ids summed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MergedUpdate<'a> {
    /// The table.
    pub table: TableId,
    /// The step that this is.
    pub step: Step,
    /// Distinct ids; or any, with a gradient for each time that one comes, of one backward pass.
    pub ids: &'a [i64],
    /// A gradient for each.
    pub sums: &'a [f32],
}

/// The most bytes of a request in JSON: read, it takes some times as much memory.
const MAX_JSON_BYTES: usize = 32 << 20;

/// How [`Step::Next`] travels: a step that nobody may take.
const NEXT_STEP: i64 = 0;

impl<'a> Request<'a> {
    /// Whether it changes rows or tables and must not be carried out twice.
    pub fn is_change(&self) -> bool {
        match self {
            Self::Write { .. } | Self::Update(_) | Self::Delete { .. } | Self::Round { .. } => true,
            // Not those that come to the same when they are made twice, such as opening a table.
            Self::Manage(management) => matches!(
                management,
                Management::DropTable { .. }
                    | Management::Clear { .. }
                    | Management::Evict { dry_run: false, .. }
                    | Management::Barrier { .. }
            ),
            _ => false,
        }
    }

    /// Whether it may change anything that a table has, and can be made again with the same effect.
    pub(crate) fn alters(&self) -> bool {
        let management = |management: &Management| {
            matches!(
                management,
                Management::OpenTable { .. }
                    | Management::Join { .. }
                    | Management::Leave {}
                    | Management::SetLearningRate { .. }
                    | Management::CountSteps { .. }
                    | Management::Agree { .. }
            )
        };
        match self {
            Self::Lookup { insert, .. } => *insert,
            Self::Manage(request) => self.is_change() || management(request),
            _ => self.is_change(),
        }
    }

    /// Returns the tables that it takes a step of.
    pub(crate) fn stepped(&self) -> Vec<TableId> {
        match self {
            Self::Update(updates) => updates.iter().map(|update| update.table).collect(),
            _ => Vec::new(),
        }
    }

    /// Whether it puts other tables in the place of those there are.
    pub(crate) fn is_load(&self) -> bool {
        matches!(self, Self::Manage(Management::Load(_)))
    }

    /// Calls `send` with the request as a frame.
    ///
    /// # Errors
    /// [`FrameError::Malformed`] if it cannot be written as JSON, which no valid request brings about.
    pub fn with_frame<R>(
        &self,
        request: u64,
        sequence: u64,
        send: impl FnOnce(&Frame<'_>) -> R,
    ) -> Result<R, FrameError> {
        // Here, as the sections borrow from them beyond the arms below.
        let (flag, text, heads, tables, words);
        let (kind, table, sections) = match self {
            Self::Manage(management) => {
                text = serde_json::to_string(management).map_err(malformed)?;
                (Kind::Manage, TableId(0), vec![Section::Json(&text)])
            }
            Self::Read(reads) => {
                tables = reads.iter().map(|read| [read.table.0]).collect::<Vec<_>>();
                let sections = reads.iter().zip(&tables).flat_map(|(read, table)| [&table[..], read.ids]);
                (Kind::Read, TableId(0), sections.map(Section::I64).collect())
            }
            Self::Write { table, ids, rows } => {
                (Kind::Write, *table, vec![Section::I64(ids), Section::F32(rows)])
            }
            Self::Update(updates) => {
                heads = updates.iter().map(MergedUpdate::head).collect::<Vec<_>>();
                let sections = updates.iter().zip(&heads).flat_map(|(update, head)| update.sections(head));
                (Kind::Update, TableId(0), sections.collect())
            }
            Self::Lookup { table, ids, insert } => {
                flag = [u32::from(*insert)];
                (Kind::Lookup, *table, vec![Section::U32(&flag), Section::I64(ids)])
            }
            Self::Delete { table, ids } => (Kind::Delete, *table, vec![Section::I64(ids)]),
            Self::Ids { table } => (Kind::Ids, *table, vec![]),
            Self::Slot { table, slot, ids } => {
                text = serde_json::to_string(slot).map_err(malformed)?;
                (Kind::Slot, *table, vec![Section::Json(&text), Section::I64(ids)])
            }
            Self::Round { members, updates } => {
                words = members.iter().flat_map(RoundMember::words).collect::<Vec<i64>>();
                heads = updates.iter().map(MergedUpdate::head).collect::<Vec<_>>();
                let steps = updates.iter().zip(&heads).flat_map(|(update, head)| update.sections(head));
                let sections = std::iter::once(Section::I64(&words)).chain(steps);
                (Kind::Round, TableId(0), sections.collect())
            }
        };
        let header = Header { table: table.0, sequence, ..Header::new(kind, request) };
        Ok(send(&Frame { header, sections }))
    }

    /// Reads the request in a frame.
    ///
    /// # Errors
    /// [`FrameError::Malformed`] for a frame of another form, or a reply; [`FrameError::Form`] for JSON that is no request.
    pub fn of(frame: &'a Received) -> Result<Self, FrameError> {
        let table = TableId(frame.header.table);
        let sections = frame.sections()?;
        Ok(match (frame.header.kind, &sections[..]) {
            (Kind::Manage, [Section::Json(text)]) => Self::Manage(management(text)?),
            (Kind::Read, sections) => Self::Read(reads(sections)?),
            (Kind::Write, &[Section::I64(ids), Section::F32(rows)]) => Self::Write { table, ids, rows },
            (Kind::Update, sections) => Self::Update(updates(sections)?),
            (Kind::Lookup, &[Section::U32(&[insert @ (0 | 1)]), Section::I64(ids)]) => {
                Self::Lookup { table, ids, insert: insert == 1 }
            }
            (Kind::Delete, &[Section::I64(ids)]) => Self::Delete { table, ids },
            (Kind::Ids, []) => Self::Ids { table },
            (Kind::Slot, &[Section::Json(slot), Section::I64(ids)]) => {
                Self::Slot { table, slot: parse(slot)?, ids }
            }
            (Kind::Round, [Section::I64(words), rest @ ..]) if words.len() % RoundMember::WORDS == 0 => {
                let members = words.chunks_exact(RoundMember::WORDS).map(RoundMember::of).collect();
                Self::Round { members, updates: updates(rest)? }
            }
            (kind, sections) => return Err(unexpected(&format!("{kind:?}"), sections)),
        })
    }
}

impl RoundMember {
    const WORDS: usize = 3;

    fn words(&self) -> [i64; Self::WORDS] {
        [self.client.0 as i64, (self.client.0 >> 64) as i64, self.sequence as i64]
    }

    fn of(words: &[i64]) -> Self {
        let [low, high, sequence] = [0, 1, 2].map(|place| words[place] as u64);
        Self { client: ClientId(u128::from(high) << 64 | u128::from(low)), sequence }
    }
}

impl MergedUpdate<'_> {
    fn head(&self) -> [i64; 2] {
        let step = match self.step {
            Step::Next => NEXT_STEP,
            Step::At(step) => step as i64,
        };
        [self.table.0, step]
    }

    fn sections<'s>(&'s self, head: &'s [i64]) -> [Section<'s>; 3] {
        [Section::I64(head), Section::I64(self.ids), Section::F32(self.sums)]
    }
}

fn management(text: &str) -> Result<Management, FrameError> {
    match text.len() {
        bytes if bytes > MAX_JSON_BYTES => Err(FrameError::Form(format!(
            "a request of {bytes} bytes of JSON exceeds the limit of {MAX_JSON_BYTES}"
        ))),
        _ => parse(text),
    }
}

fn reads<'a>(sections: &[Section<'a>]) -> Result<Vec<TableIds<'a>>, FrameError> {
    let read = |sections: &[Section<'a>]| match *sections {
        [Section::I64(&[table]), Section::I64(ids)] => Ok(TableIds { table: TableId(table), ids }),
        _ => Err(unexpected("Read", sections)),
    };
    // A section that is left over is a chunk of one, which is refused.
    sections.chunks(2).map(read).collect()
}

fn updates<'a>(sections: &[Section<'a>]) -> Result<Vec<MergedUpdate<'a>>, FrameError> {
    let update = |sections: &[Section<'a>]| match *sections {
        [Section::I64(&[table, step]), Section::I64(ids), Section::F32(sums)] => {
            let step = if step == NEXT_STEP { Step::Next } else { Step::At(step as u64) };
            Ok(MergedUpdate { table: TableId(table), step, ids, sums })
        }
        _ => Err(unexpected("Update", sections)),
    };
    sections.chunks(3).map(update).collect()
}

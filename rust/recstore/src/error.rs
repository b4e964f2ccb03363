//! The errors of the store: every one names the table or the key it is about, what was expected and what came.

/// What a call on the store returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call was refused. A refused call has changed nothing.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No table has this name.
    #[error("{operation}: there is no table \"{table}\"")]
    UnknownTable {
        /// The call that was refused.
        operation: &'static str,
        /// The name asked for.
        table: String,
    },

    /// No live table has this number: it was never handed out, or its table was dropped.
    #[error("{operation}: table handle {handle} is unknown, released or dropped")]
    UnknownHandle {
        /// The call that was refused.
        operation: &'static str,
        /// The handle given.
        handle: i64,
    },

    /// The table exists with another configuration.
    #[error(
        "table \"{table}\" exists with the configuration {existing}, which differs from the requested {requested}"
    )]
    ConfigMismatch {
        /// The table's name.
        table: String,
        /// The configuration of the existing table, as JSON.
        existing: String,
        /// The configuration asked for, as JSON.
        requested: String,
    },

    /// A configuration has an unknown key or kind, or a value out of its range.
    #[error("invalid table configuration: {message}")]
    InvalidConfig {
        /// The key, its value, and what would be valid.
        message: String,
    },

    /// An id lies outside `[0, num_embeddings)` of a table that has a bound.
    #[error(
        "{operation}: id {id} at position {position} is out of range for table \"{table}\" with num_embeddings {num_embeddings}"
    )]
    IdOutOfRange {
        /// The call that was refused.
        operation: &'static str,
        /// The table's name.
        table: String,
        /// The id refused.
        id: i64,
        /// Its position among the ids of the call, flattened.
        position: usize,
        /// The table's bound.
        num_embeddings: u64,
    },

    /// Rows or gradients have another width than the table.
    #[error("{operation}: table \"{table}\" has dim {expected}, got {actual}")]
    DimMismatch {
        /// The call that was refused.
        operation: &'static str,
        /// The table's name.
        table: String,
        /// The table's dim.
        expected: usize,
        /// What came, such as `gradient rows of 32`.
        actual: String,
    },

    /// Two inputs that belong together have different lengths.
    #[error("{operation}: expected {expected} {what}, got {actual}")]
    LengthMismatch {
        /// The call that was refused.
        operation: &'static str,
        /// What is counted, such as `rows for the ids of table "user"`.
        what: String,
        /// The number expected.
        expected: usize,
        /// The number given.
        actual: usize,
    },

    /// A row or a gradient holds a NaN or an infinity and the table's `nan_policy` is `error`.
    #[error("{operation}: {what} of id {id} at position {position} of table \"{table}\" holds {value}")]
    NonFinite {
        /// The call that was refused.
        operation: &'static str,
        /// `row`, `gradient` or `summed gradient`.
        what: &'static str,
        /// The table's name.
        table: String,
        /// The id whose values are refused.
        id: i64,
        /// The position of the id, of a sum its first one, among the ids of the call, flattened.
        position: usize,
        /// The offending value.
        value: f32,
    },

    /// Gradients that a collector keeps where they are were changed there before they were applied.
    #[error(
        "apply_grads: ids or gradients of table \"{table}\" were changed in place between backward and the step; clear them with zero_grad, or change a copy"
    )]
    GradientsChanged {
        /// The table's name.
        table: String,
    },

    /// Bags whose offsets do not rise from zero to the number of ids, or whose mode and weights do not go together.
    #[error("emb_bag: {message}")]
    InvalidBag {
        /// The offending value, its position and what was expected.
        message: String,
    },

    /// The table can hold no more rows.
    #[error("{operation}: table \"{table}\" is full: {rows} rows and {requested} more would exceed {limit}")]
    TableFull {
        /// The call that was refused.
        operation: &'static str,
        /// The table's name.
        table: String,
        /// The rows it holds.
        rows: usize,
        /// The rows the call might add.
        requested: usize,
        /// The most rows a table can hold.
        limit: usize,
    },

    /// New rows would exceed the memory limit of the table or of the store.
    #[error(
        "{operation}: table \"{table}\": {requested} bytes more would exceed the {whose} memory limit of {limit} bytes, of which {in_use} are in use"
    )]
    MemoryLimit {
        /// The call that was refused.
        operation: &'static str,
        /// The table's name.
        table: String,
        /// Whose limit it is: `table's` or `store's`.
        whose: &'static str,
        /// The limit, in bytes.
        limit: u64,
        /// What the table or the store takes, in bytes.
        in_use: u64,
        /// What the call needs besides, in bytes.
        requested: u64,
    },

    /// Rows cannot be written to the table's slot file or read from it.
    #[error("table \"{table}\": the slot file in {path}: {message}")]
    Disk {
        /// The table's name.
        table: String,
        /// The directory of the slot file.
        path: String,
        /// What went wrong.
        message: String,
    },

    /// A learning rate is negative, NaN or infinite, or zero where the rule divides by it.
    #[error(
        "table \"{table}\": the learning rate must be finite and not negative (for ftrl positive), got {value}"
    )]
    InvalidLearningRate {
        /// The table's name.
        table: String,
        /// The value refused.
        value: f64,
    },

    /// An update's step is no number from 1 to [`crate::MAX_STEP`].
    #[error("emb_update: table \"{table}\": the step must be from 1 to 2^53")]
    InvalidStep {
        /// The table's name.
        table: String,
    },

    /// A table is to be trained by a rule that the store does not know.
    #[error(
        "table \"{table}\": the update rule \"{rule}\" is not registered with this store, which has {registered:?}"
    )]
    UnknownRule {
        /// The table's name.
        table: String,
        /// The rule's name.
        rule: String,
        /// The names of the rules that are.
        registered: Vec<String>,
    },

    /// A rule of the program's own panicked, and rows are of different steps.
    #[error(
        "table \"{table}\": the update rule \"{rule}\" panicked, and rows may be of different steps: clear the table or load a checkpoint ({message})"
    )]
    RuleFailed {
        /// The table's name.
        table: String,
        /// The rule's name.
        rule: String,
        /// What the panic said.
        message: String,
    },

    /// A step met an error when rows had changed already: those of one table are of different steps, its other tables have
    /// taken it.
    #[error(transparent)]
    StepCutShort(Box<Error>),

    /// What an optimizer is to keep does not fit the table.
    #[error("put_optimizer_states: table \"{table}\": {message}")]
    StateMismatch {
        /// The table's name.
        table: String,
        /// What was expected and what was given.
        message: String,
    },

    /// A forked child tried to change a table of its parent, where the change would be lost.
    #[error(
        "{operation}: table \"{table}\" belongs to the parent of this forked process; a change here would be lost (reads are fine; to train in a child, start it with \"spawn\" or open tables of its own)"
    )]
    ForkedChild {
        /// The call that was refused.
        operation: &'static str,
        /// The table's name.
        table: String,
    },

    /// A checkpoint cannot be written, or is not what it should be.
    #[error("checkpoint: {path}: {message}")]
    Checkpoint {
        /// The file or directory.
        path: String,
        /// What is wrong with it.
        message: String,
    },

    /// The file of a frozen table cannot be written, or is not what it was when it was written.
    #[error("frozen table: {path}: {message}")]
    Frozen {
        /// The file.
        path: String,
        /// What is wrong with it.
        message: String,
    },

    /// A table has a publication already.
    #[error("publish: table \"{table}\" is published already: close the other publisher first")]
    Published {
        /// The table's name.
        table: String,
    },

    /// A row has a value that an encoding has no number for.
    #[error("{value} in the row of id {id} cannot be kept as {encoding}")]
    Unencodable {
        /// The row's id.
        id: i64,
        /// The value.
        value: f32,
        /// The encoding.
        encoding: String,
    },

    /// A frozen table does not change.
    #[error("{operation}: table \"{table}\" is frozen: it is read only")]
    ReadOnly {
        /// The call that was refused.
        operation: &'static str,
        /// The table's name.
        table: String,
    },

    /// A table does not note its changes for a publication.
    #[error(
        "publish: the changes of table \"{table}\" are no longer noted: it was loaded anew, or had no memory left for them"
    )]
    NotPublished {
        /// The table's name.
        table: String,
    },

    /// A table from which no row ever leaves was asked which ones do.
    #[error("{operation}: table \"{table}\" has no eviction")]
    NoEviction {
        /// The call that was refused.
        operation: &'static str,
        /// The table's name.
        table: String,
    },

    /// A prefetch was never issued, was consumed before, or was dropped for newer ones.
    #[error("prefetch handle {prefetch} is unknown, consumed or dropped")]
    UnknownPrefetch {
        /// The number given.
        prefetch: i64,
    },

    /// A server cannot be reached, or gave no answer in time.
    ///
    /// Of a change it is not known which servers have it: the same call again changes the others, and no server twice.
    #[error("{operation}: shard {shard} at {address} is unavailable: {message}")]
    Unavailable {
        /// The call that was refused.
        operation: &'static str,
        /// The number of the server.
        shard: usize,
        /// Where it should be.
        address: String,
        /// What happened.
        message: String,
    },

    /// Workers that go together do not: some are dead, late, or not what they say.
    #[error("{operation}: shard {shard}: {message}")]
    Workers {
        /// The call that was refused.
        operation: &'static str,
        /// The number of the server.
        shard: usize,
        /// Who is missing, and how long that was borne.
        message: String,
    },

    /// A request or its answer is larger than a server takes at a time.
    #[error(
        "{operation}: {bytes} bytes for shard {shard} exceed the {limit} it takes at a time (max_frame_bytes)"
    )]
    RequestTooLarge {
        /// The call that was refused.
        operation: &'static str,
        /// The number of the server.
        shard: usize,
        /// The bytes of the request or answer.
        bytes: u64,
        /// The most the server takes.
        limit: u64,
    },

    /// A call that a store on servers cannot do.
    #[error("{operation}: {message}")]
    Unsupported {
        /// The call that was refused.
        operation: &'static str,
        /// Why, and what to do instead.
        message: String,
    },

    /// The processor lacks the instructions asked for, or the name is unknown.
    #[error("SIMD level \"{level}\" is not available; this machine has {available}")]
    UnavailableSimd {
        /// The level asked for.
        level: String,
        /// The levels there are.
        available: String,
    },
}

impl Error {
    /// Returns the call that was refused, of an error that begins with it.
    pub fn operation(&self) -> Option<&'static str> {
        match self {
            Self::UnknownTable { operation, .. }
            | Self::UnknownHandle { operation, .. }
            | Self::IdOutOfRange { operation, .. }
            | Self::DimMismatch { operation, .. }
            | Self::LengthMismatch { operation, .. }
            | Self::NonFinite { operation, .. }
            | Self::TableFull { operation, .. }
            | Self::MemoryLimit { operation, .. }
            | Self::ForkedChild { operation, .. }
            | Self::ReadOnly { operation, .. }
            | Self::NoEviction { operation, .. }
            | Self::Unavailable { operation, .. }
            | Self::Workers { operation, .. }
            | Self::RequestTooLarge { operation, .. }
            | Self::Unsupported { operation, .. } => Some(operation),
            Self::InvalidStep { .. } => Some("emb_update"),
            Self::InvalidBag { .. } => Some("emb_bag"),
            Self::StepCutShort(error) => error.operation(),
            _ => None,
        }
    }
}

impl Error {
    /// Moves the position that the error names, where the ids checked start at `start` among those of the call.
    #[must_use]
    pub fn shifted(mut self, start: usize) -> Self {
        if let Self::IdOutOfRange { position, .. } | Self::NonFinite { position, .. } = &mut self {
            *position += start;
        }
        self
    }

    /// Sets the position that the error names to the first of its id.
    pub(crate) fn at_first_of_its_id(mut self, first: impl Fn(i64) -> Option<usize>) -> Self {
        if let Self::NonFinite { id, position, .. } = &mut self {
            *position = first(*id).unwrap_or(*position);
        }
        self
    }
}

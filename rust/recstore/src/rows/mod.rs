//! Rows and their gradients, whichever table they are of.

pub(crate) mod any_row_type;
mod chosen_gradients;
pub(crate) mod coded_row;
pub(crate) mod coded_squares;
pub(crate) mod distinct;
pub(crate) mod dtype;
pub(crate) mod feature_hashing;
pub(crate) mod gradient;
mod in_order;
pub(crate) mod merged_before;
pub(crate) mod pooling;
pub(crate) mod rank_pieces;
pub(crate) mod rank_requests;
pub(crate) mod row_type;

//! Requests that their callers may repeat. See docs/decisions/0088.

use serde::{Deserialize, Serialize};

use crate::object::string_enum;

string_enum! {
    /// How far a request with an idempotency key is.
    IdempotencyState {
        /// It has changed nothing yet. If its execution has ended without a response, it may be executed again.
        Running = "running",
        /// It has changed something. It must not be executed again.
        Changed = "changed",
        /// Its response is stored.
        Finished = "finished",
    }
}

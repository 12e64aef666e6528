//! Authentication of callers, and what they may see and do.

pub mod access;
pub mod console_key;
mod hash_queue;
pub mod identity;
mod request_deadline;
pub mod row_cipher;
pub mod scopes;
pub mod secrets;
pub mod tokens;

pub use access::{Caller, Origin};
pub use request_deadline::{ForwardedDeadline, ForwardedRequests, RequestDeadline};

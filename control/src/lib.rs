//! Muster's control plane: the API, the rules, the queued work, the store and the events.

pub mod events;
pub mod store;

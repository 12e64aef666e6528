//! Muster's control plane: the API, the rules, the queued work, the store and the events.

pub mod app;
pub mod auth;
pub mod events;
mod fetch;
pub mod health;
pub mod http;
pub mod objects;
pub mod operations;
pub mod reconcile;
pub mod scheduler;
pub mod store;

pub use app::App;

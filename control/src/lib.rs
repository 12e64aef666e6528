//! Muster's control plane: objects and their rules, operations, reconcilers, scheduler and events.

pub mod app;
pub mod auth;
pub mod backup;
pub mod daemon_metrics;
pub mod events;
pub mod exposition;
mod fetch;
pub mod health;
pub mod objects;
pub mod operations;
pub mod peer;
pub mod queue;
pub mod reconcile;
pub mod scheduler;
pub mod state;
pub mod traces;

pub use app::App;

//! Events are recorded into a durable local queue and written to the database by a drainer. See docs/decisions/0002.
//!
//! Recording never waits for the database. Once `record` returns, an event survives the death of the process. The
//! queues of dead processes are drained at the next start.

mod budget;
mod drain;
mod loki;
pub mod metrics;
mod prune;
mod recorder;
mod sampling;
mod spool;

pub use budget::EventBudget;
pub use drain::Drainer;
pub use metrics::Metrics;
pub(crate) use prune::clear_events;
pub use prune::{PruneOutcome, prune};
pub use recorder::Events;
pub use sampling::RefusalKind;

//! The node side of Muster: networks, storage and VMs of one host. The control plane uses it only through
//! [`muster_types::node::NodeApi`].

mod change_notifier;
mod command;
mod console_connections;
mod fencing;
mod files;
mod guest;
mod host;
mod host_checks;
mod image;
mod local;
mod lost_found;
mod network;
mod replica_messages;
mod sim;
mod storage;
mod user_ids;
mod vm;
mod vm_socket;

pub use host_checks::check_host;
pub use local::LocalNode;
pub use sim::{GuestScript, SimulatedNode, SimulationScript};
pub use vm::run_watchdog;

//! What runs on one machine of a cluster. The control plane reaches it only through
//! [`muster_types::node::NodeApi`].

mod host;
mod local;
mod sim;

pub use local::LocalNode;
pub use sim::SimulatedNode;

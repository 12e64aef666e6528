//! Instances on real nodes.

mod kill;
mod released_client;
mod workload;

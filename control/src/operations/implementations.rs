//! The table of all operations.

use super::step::Implementation;
use super::{
    clean_namespace, clean_network, convert_image, create_instance, create_network, delete_instance,
    delete_namespace, delete_network, drain_node, evacuate_instance, fetch_artifact, migrate_instance,
    plug_interface, prepare_migration, rebalance_cluster, release_instance, snapshot_instance,
    start_instance,
};

/// Every operation that a worker can run.
pub static IMPLEMENTATIONS: &[Implementation] = &[
    delete_namespace::IMPLEMENTATION,
    clean_namespace::IMPLEMENTATION,
    create_network::IMPLEMENTATION,
    delete_network::IMPLEMENTATION,
    clean_network::IMPLEMENTATION,
    fetch_artifact::IMPLEMENTATION,
    convert_image::IMPLEMENTATION,
    create_instance::IMPLEMENTATION,
    start_instance::IMPLEMENTATION,
    evacuate_instance::IMPLEMENTATION,
    prepare_migration::IMPLEMENTATION,
    migrate_instance::IMPLEMENTATION,
    drain_node::IMPLEMENTATION,
    rebalance_cluster::IMPLEMENTATION,
    release_instance::IMPLEMENTATION,
    plug_interface::IMPLEMENTATION,
    snapshot_instance::IMPLEMENTATION,
    delete_instance::IMPLEMENTATION,
];

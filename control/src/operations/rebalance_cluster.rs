//! Migrates instances from full nodes to empty ones. See docs/decisions/0075.

use super::step::{Implementation, Step, Undo};
use crate::objects::rebalance;
use crate::queue::{Operation as _, RebalanceCluster};

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    RebalanceCluster::KIND,
    &[Step {
        name: "cluster_migrate_instances",
        run: |app, row| Box::pin(rebalance::migrate_instances(app, row)),
        undo: Undo::NotNeeded("each migration ends by itself, and the instances that have moved stay"),
    }],
);

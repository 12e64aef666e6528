//! Migrates the instances of a node that is drained. See docs/decisions/0071.

use muster_store::operations::OperationRow;
use muster_types::{Error, Result};

use super::step::{Implementation, Step, Undo};
use crate::app::App;
use crate::objects::node_drain;
use crate::queue::{DrainNode, Operation as _};

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    DrainNode::KIND,
    &[Step {
        name: "node_migrate_instances",
        run: |app, row| Box::pin(migrate_instances(app, row)),
        undo: Undo::NotNeeded(
            "the node gets no new instances until it is undrained, and migrations end by themselves",
        ),
    }],
);

async fn migrate_instances(app: &App, row: &OperationRow) -> Result<()> {
    let malformed = |_| Error::Internal("the target of the operation is not a node id".into());
    node_drain::migrate_instances(app, row.target.id.parse().map_err(malformed)?).await
}

//! Releases everything that an instance uses whose creation ended without a result.

use muster_store::operations::OperationRow;
use muster_types::Result;

use super::step::{Implementation, Step, Undo};
use crate::app::App;
use crate::objects::instance::state::fail_creation;
use crate::queue::{Operation as _, ReleaseInstance};

pub(super) const IMPLEMENTATION: Implementation = Implementation::new(
    ReleaseInstance::KIND,
    &[Step {
        name: "instance_release",
        run: |app, row| Box::pin(release(app, row)),
        undo: Undo::NotNeeded("the next attempt releases the rest"),
    }],
);

async fn release(app: &App, row: &OperationRow) -> Result<()> {
    let ReleaseInstance { reason } = ReleaseInstance::parameters(row)?;
    fail_creation(app, row, &reason).await
}

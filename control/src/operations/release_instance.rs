//! Gives back all that an instance has whose creation ended without a result.

use muster_types::operation::OperationType;

use super::create_instance::give_up;
use super::{Kind, Lane, Step, Undo};

pub const KIND: Kind = Kind {
    operation_type: OperationType::Instance,
    name: "release_instance",
    removes_target: false,
    lane: Lane::Machine,
    steps: &[Step {
        name: "instance_release",
        run: |app, row| {
            let reason = row.arguments["reason"].as_str().unwrap_or("unknown");
            Box::pin(give_up(app, row, reason))
        },
        undo: Undo::NotNeeded("what is not given back yet is given back by the next attempt"),
    }],
};

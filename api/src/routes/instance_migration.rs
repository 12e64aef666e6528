//! `/instances`: migration. See docs/decisions/0070.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::Response;
use muster_types::Error;
use muster_types::ids::InstanceId;
use muster_types::key::{RESERVED_NAME_PREFIX, Secret};
use muster_types::migration::{MIGRATION_PROTOCOL, MigrationChannel, MigrationConnection, MigrationSettings};
use muster_types::operation::OperationRecord;
use serde::Deserialize;
use utoipa::ToSchema;

use crate::arguments::{Args, NoArgs, required};
use crate::error::ApiResult;
use crate::guard::Authenticated;
use crate::response::{Accepted, Null};
use crate::upgrade::RequestedUpgrade;
use muster_control::app::App;
use muster_control::objects::instance::incoming;
use muster_control::objects::instance::migrate::{self, MigrationRequest};

/// Where and how an instance is migrated.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"target": "sim-2", "downtime_limit_ms": 300}))]
pub(crate) struct NewMigration {
    /// The name or UUID of the node to migrate to; absent: the scheduler chooses it.
    target: Option<String>,
    /// The guest is stopped when the rest of its memory is expected to be copied within this number of milliseconds; absent:
    /// 300.
    downtime_limit_ms: Option<u64>,
    /// The maximum bandwidth of the copy of all disks, and then of the memory, in megabits per second; absent: unlimited.
    bandwidth_limit_mbps: Option<u64>,
    /// Whether an instance that is on or paused is powered off, and started on the target: if it cannot be migrated while it
    /// runs; absent: false.
    stop: Option<bool>,
    /// Whether the guest is slowed down if it changes its memory faster than it is copied; absent: false.
    auto_converge: Option<bool>,
}

/// Migrates an instance to another node. The guest of one that is on or paused is not restarted, unless `stop` is true; of one
/// that is off, the disks are copied. The response is the operation that completes when the instance is on the target; its
/// `progress` counts the bytes of disks and memory. If anything fails, the instance continues on its node.
#[utoipa::path(post, path = "/instances/{instance_ref}/migrate", tag = "instances",
    params(("instance_ref" = String, Path)), request_body = NewMigration, responses(
    (status = 404, description = "No such instance or node."), (status = 406, description = "The instance is not ready, or has unfinished operations."),
    (status = 409, description = "The instance is being migrated, or the target is not suitable; `error` says why."),
    (status = 507, description = "No other node has capacity for the instance.")))]
pub(crate) async fn start(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    Args(new): Args<NewMigration>,
) -> ApiResult<Accepted<OperationRecord>> {
    let settings = MigrationSettings {
        downtime_limit_ms: new.downtime_limit_ms,
        bandwidth_limit_mbps: new.bandwidth_limit_mbps,
        auto_converge: new.auto_converge.unwrap_or(false),
    };
    let request = MigrationRequest { target: new.target, stop: new.stop.unwrap_or(false), settings };
    Ok(Accepted(migrate::start(&app, &caller, &reference, request).await?))
}

/// Cancels the migration of an instance, which continues on its node. The operation ends in `error` when the target is
/// removed, or in `complete` if the instance has moved already.
#[utoipa::path(post, path = "/instances/{instance_ref}/migrate/cancel", tag = "instances",
    params(("instance_ref" = String, Path)), responses((status = 404, description = "No such instance."),
    (status = 409, description = "The instance is not being migrated, or its node is drained and the caller is not of the namespace `system`.")))]
pub(crate) async fn cancel(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    _: Args<NoArgs>,
) -> ApiResult<Null> {
    migrate::cancel(&app, &caller, &reference).await?;
    Ok(Null)
}

/// A connection to the target of a migration, or to a replica.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"channel": "disk", "generation": 2}))]
pub(crate) struct NewMigrationConnection {
    /// The data that the connection carries.
    #[schema(value_type = MigrationChannel)]
    channel: Option<String>,
    /// The generation of the VM on the target or, for a replica, of the VM that is copied.
    #[schema(value_type = i64)]
    generation: Option<i64>,
    /// The password of the display, which does not change.
    password: Option<String>,
}

/// Connects the daemon of the source of a migration to the VM on the target, or that of an instance to its replica: the connection
/// changes from HTTP to the protocol `muster-migration`, and carries bytes of QEMU or of copies. Only daemons can call it.
#[utoipa::path(post, path = "/instances/{instance_ref}/migration", tag = "instances",
    params(("instance_ref" = String, Path)), request_body = NewMigrationConnection, responses(
    (status = 101, description = "The connection now carries the bytes of QEMU."),
    (status = 400, description = "A field is missing or malformed, or the upgrade is not requested."),
    (status = 404, description = "No such instance."),
    (status = 409, description = "The instance is not being migrated to a node of this daemon, and has no replica there.")))]
pub(crate) async fn connect(
    State(app): State<Arc<App>>,
    Authenticated(caller): Authenticated,
    Path(reference): Path<String>,
    upgrade: RequestedUpgrade,
    Args(new): Args<NewMigrationConnection>,
) -> ApiResult<Response> {
    if !caller.key_name.starts_with(RESERVED_NAME_PREFIX) {
        return Err(Error::Forbidden("only daemons of the cluster connect to migrations".into()).into());
    }
    let id: InstanceId = reference.parse().map_err(|_| Error::not_found("instance"))?;
    let channel = required("channel", new.channel)?;
    let invalid = || {
        Error::Invalid(format!("channel: {channel:?} is not \"memory\", \"disk\", \"files\" or \"replica\""))
    };
    let connection = MigrationConnection {
        channel: channel.parse::<MigrationChannel>().map_err(|_| invalid())?,
        display_password: new.password.map(Secret::new),
    };
    let upgrade = upgrade.require(MIGRATION_PROTOCOL)?;
    let stream = incoming::connect(&app, id, required("generation", new.generation)?, &connection).await?;
    let stream = tokio::net::UnixStream::from_std(stream)
        .map_err(|error| Error::Internal(format!("failed to connect to the VM: {error}")))?;
    Ok(upgrade.relay(stream))
}

//! `muster instance migrate`: moves an instance to another node.

use anyhow::bail;
use clap::Args;
use muster_types::operation::{OperationRecord, OperationState};

use super::operation;
use super::session::Session;
use super::wait::{LongWaitOptions, PollTimer};
use crate::api::{Client, ListQuery, NewMigration};
use crate::exit_code::timed_out;
use crate::output::escape_control;
use crate::progress::{ProgressMeter, show_progress};
use crate::transfer::unless_interrupted;

/// Arguments of `muster instance migrate`.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Name or id of the instance
    pub(super) instance: String,
    /// Node to migrate to; without it the scheduler chooses one
    #[arg(long, value_name = "NODE")]
    to: Option<String>,
    /// Stop the guest when the rest of its memory is expected to be copied within this time (default: 300)
    #[arg(long, value_name = "MILLISECONDS")]
    downtime_limit: Option<u64>,
    /// Maximum bandwidth of the copy of all disks, and then of the memory, in megabits per second
    #[arg(long, value_name = "MBPS")]
    bandwidth_limit: Option<u64>,
    /// Slow the guest down if it changes its memory faster than it is copied
    #[arg(long)]
    auto_converge: bool,
    /// Power an instance that is on off, and start it on the target
    #[arg(long)]
    stop: bool,
    #[command(flatten)]
    wait: LongWaitOptions,
}

/// Migrates an instance, and shows the progress until it is on the target.
pub(super) async fn migrate(session: &Session, arguments: Arguments) -> anyhow::Result<()> {
    let Arguments { instance, to, downtime_limit, bandwidth_limit, auto_converge, stop, wait } = arguments;
    let client = &session.client;
    let new = NewMigration {
        target: to,
        downtime_limit_ms: downtime_limit,
        bandwidth_limit_mbps: bandwidth_limit,
        auto_converge,
        stop,
    };
    let response = client.migrate_instance(&instance, &new).await?;
    let Some(timer) = wait.timer() else {
        return session.confirm(&response, &format!("instance {instance} is being migrated"));
    };
    let started = response.clone().value()?;
    let consequence = || format!("the migration continues: see `muster instance operations {instance}`");
    unless_interrupted(wait_until_moved(client, &instance, started, timer), consequence).await?;
    let record = client.instance(&instance).await?;
    let node = record.clone().value()?.node.unwrap_or_default();
    session.confirm(&record, &format!("instance {instance} is on node {node}"))
}

async fn wait_until_moved(
    client: &Client,
    instance: &str,
    mut record: OperationRecord,
    mut timer: PollTimer,
) -> anyhow::Result<()> {
    let meter = ProgressMeter::new(&format!("migrating {instance}"), 0, None);
    loop {
        if let Some(progress) = &record.progress {
            show_progress(&meter, progress);
        }
        match record.state {
            OperationState::Queued | OperationState::Executing => {}
            OperationState::Complete => return Ok(()),
            OperationState::Error | OperationState::Abort => {
                bail!(
                    "the migration failed, and the instance stays on its node: {}",
                    failure(client, &record).await
                )
            }
        }
        if !timer.tick().await {
            return Err(timed_out(format!(
                "timed out; the migration continues: see `muster instance operations {instance}`"
            )));
        }
        record = client.operation(record.operation_type.as_str(), &record.uuid.to_string()).await?.value()?;
    }
}

/// Returns why a migration failed: the error of the first operation of its chain.
async fn failure(client: &Client, record: &OperationRecord) -> String {
    let chain = client.operation_chain(&record.uuid.to_string(), &ListQuery::default()).await;
    let chain = chain.and_then(crate::api::ApiResponse::value).unwrap_or_default();
    let failed = chain.iter().rev().find(|operation| operation.error_report.is_some());
    escape_control(&operation::error(failed.unwrap_or(record)))
}

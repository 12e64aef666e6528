//! `muster claim`.

use clap::{Args, Subcommand};
use muster_types::claim::ClaimRecord;
use muster_types::object::ObjectType;
use muster_types::time::now;

use super::events::{self, EventFilter};
use super::instance_specs::{parse_gigabytes, parse_memory};
use super::list::{ListOptions, ListView};
use super::metadata;
use super::session::Session;
use crate::api::{ClaimLimits, ObjectPath};
use crate::output::Table;
use crate::time::{format_utc, parse_expiry};

const LIST: ListView<ClaimRecord> =
    ListView { table, wide: &["state", "version"], order: &[], watched: &[ObjectType::NamespaceClaim] };

/// Commands for capacity claims, which are given by id.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the claims of a namespace, including expired ones
    List {
        namespace: String,
        #[command(flatten)]
        list: ListOptions,
    },
    /// Show a claim
    Show { namespace: String, claim: String },
    /// Reserve capacity of the cluster for a namespace
    Create {
        namespace: String,
        #[command(flatten)]
        limits: NewClaim,
        /// Check the request without creating anything
        #[arg(long)]
        dry_run: bool,
    },
    /// Change a claim; options that are not given keep their value
    Update {
        namespace: String,
        claim: String,
        #[command(flatten)]
        limits: ClaimChanges,
    },
    /// Delete a claim and release its capacity
    Delete { namespace: String, claim: String },
    /// Show the events of a claim, newest first
    Events {
        namespace: String,
        claim: String,
        #[command(flatten)]
        filter: EventFilter,
    },
    /// Show the metadata of a claim
    Metadata { namespace: String, claim: String },
    /// Set a metadata key of a claim
    SetMetadata {
        namespace: String,
        claim: String,
        #[command(flatten)]
        item: metadata::MetadataItem,
    },
    /// Delete a metadata key of a claim
    DeleteMetadata {
        namespace: String,
        claim: String,
        #[arg(value_name = "KEY")]
        item: String,
    },
}

/// The limits of a new claim.
#[derive(Debug, Args)]
pub struct NewClaim {
    /// Number of vCPUs
    #[arg(long, value_name = "N")]
    cpus: u64,
    /// Memory in megabytes, or with a unit such as 64G
    #[arg(long, value_name = "SIZE", value_parser = parse_memory)]
    memory: u64,
    /// Disk space in gigabytes, or with a unit such as 2T
    #[arg(long, value_name = "SIZE", value_parser = parse_gigabytes)]
    disk: u64,
    /// When it expires: a duration such as 2h or 30d, or a Unix time
    #[arg(long, value_name = "WHEN", value_parser = parse_expiry)]
    expires: f64,
}

/// Changes of a claim.
#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub struct ClaimChanges {
    /// Number of vCPUs
    #[arg(long, value_name = "N")]
    cpus: Option<u64>,
    /// Memory in megabytes, or with a unit such as 64G
    #[arg(long, value_name = "SIZE", value_parser = parse_memory)]
    memory: Option<u64>,
    /// Disk space in gigabytes, or with a unit such as 2T
    #[arg(long, value_name = "SIZE", value_parser = parse_gigabytes)]
    disk: Option<u64>,
    /// When it expires: a duration such as 2h or 30d, or a Unix time
    #[arg(long, value_name = "WHEN", value_parser = parse_expiry)]
    expires: Option<f64>,
}

impl From<NewClaim> for ClaimChanges {
    fn from(new: NewClaim) -> Self {
        Self {
            cpus: Some(new.cpus),
            memory: Some(new.memory),
            disk: Some(new.disk),
            expires: Some(new.expires),
        }
    }
}

impl ClaimChanges {
    fn limits(&self, now: f64) -> ClaimLimits {
        ClaimLimits {
            limit_cpus: self.cpus,
            limit_memory_mb: self.memory,
            limit_disk_gb: self.disk,
            expires_in_seconds: self.expires.map(|when| (when - now).round() as i64),
        }
    }
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::List { namespace, list } => {
            let query = list.query();
            session.list(&list, &LIST, || client.claims(&namespace, &query)).await
        }
        Command::Show { namespace, claim } => session.show(client.claim(&namespace, &claim).await?, details),
        Command::Create { namespace, limits, dry_run } => {
            let limits = ClaimChanges::from(limits).limits(now());
            let response = client.with_dry_run(dry_run).create_claim(&namespace, &limits).await?;
            session.show_created(response, dry_run, details)
        }
        Command::Update { namespace, claim, limits } => {
            session.show(client.update_claim(&namespace, &claim, &limits.limits(now())).await?, details)
        }
        Command::Delete { namespace, claim } => {
            let response = client.delete_claim(&namespace, &claim).await?;
            session.confirm(&response, &format!("claim {claim} deleted"))
        }
        Command::Events { namespace, claim, filter } => {
            events::show(session, ObjectPath::Claim(&namespace, &claim), &filter).await
        }
        Command::Metadata { namespace, claim } => {
            metadata::show(session, ObjectPath::Claim(&namespace, &claim)).await
        }
        Command::SetMetadata { namespace, claim, item } => {
            metadata::set(session, ObjectPath::Claim(&namespace, &claim), &item).await
        }
        Command::DeleteMetadata { namespace, claim, item } => {
            metadata::delete(session, ObjectPath::Claim(&namespace, &claim), &item).await
        }
    }
}

/// Formats the used and the claimed amount of a resource.
fn format_usage(used: i64, limit: i64, unit: &str) -> String {
    format!("{used} of {limit}{unit}")
}

fn table(claims: Vec<ClaimRecord>) -> Table {
    let header = ["UUID", "COVERAGE", "CPUS", "MEMORY", "DISK", "EXPIRES"];
    Table::new(&header, &[]).rows(claims.into_iter().map(|claim| {
        [
            claim.uuid.to_string(),
            claim.coverage_state.to_string(),
            format_usage(claim.used_cpus, claim.limit_cpus, ""),
            format_usage(claim.used_memory_mb, claim.limit_memory_mb, " MB"),
            format_usage(claim.used_disk_gb, claim.limit_disk_gb, " GB"),
            format_utc(claim.expires_at),
        ]
    }))
}

fn details(claim: ClaimRecord) -> Table {
    let details = [
        ("uuid", claim.uuid.to_string()),
        ("namespace", claim.namespace),
        ("coverage", claim.coverage_state.to_string()),
        ("cpus used", format_usage(claim.used_cpus, claim.limit_cpus, "")),
        ("memory used", format_usage(claim.used_memory_mb, claim.limit_memory_mb, " MB")),
        ("disk used", format_usage(claim.used_disk_gb, claim.limit_disk_gb, " GB")),
        ("expires", format_utc(claim.expires_at)),
        ("updated", format_utc(claim.updated_at)),
    ];
    Table::key_values(details.map(|(name, value)| (name.to_owned(), value)))
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn shows_the_usage_of_each_resource() {
        let claim = json!({
            "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "namespace": "ci", "state": "created",
            "coverage_state": "active", "limit_cpus": 8, "limit_memory_mb": 4096, "limit_disk_gb": 50, "used_cpus": 3,
            "used_memory_mb": 1024, "used_disk_gb": 60, "expires_at": 1_767_225_600.0, "updated_at": 0.0, "version": 1,
            "metadata": {}
        });
        let claims: Vec<ClaimRecord> = from_value(json!([claim])).unwrap();
        let text = table(claims.clone()).render(None);
        let line = "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01  active    3 of 8  1024 of 4096 MB  60 of 50 GB  \
                    2026-01-01T00:00:00.000Z";
        assert_eq!(text.lines().nth(1), Some(line));
        assert!(details(claims[0].clone()).render(None).contains("60 of 50 GB"));
    }

    #[test]
    fn sends_only_given_limits_and_the_expiry_in_seconds_from_now() {
        let changes = ClaimChanges { cpus: None, memory: Some(2048), disk: None, expires: Some(1060.4) };
        assert_eq!(json!(changes.limits(1000.0)), json!({"limit_memory_mb": 2048, "expires_in_seconds": 60}));
    }
}

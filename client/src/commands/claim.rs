//! `muster claim`.

use clap::{Args, Subcommand};
use muster_types::claim::ClaimRecord;
use muster_types::time::now;

use super::Session;
use super::events::{self, Which};
use super::instance_specs::{gigabytes, memory};
use crate::api::{ClaimLimits, Object};
use crate::output::Table;
use crate::time::{expiry, iso};

/// The commands about what namespaces were promised of the cluster. A claim goes by its id.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the claims of a namespace, with those that have expired
    List { namespace: String },
    /// Show one claim
    Show { namespace: String, claim: String },
    /// Keep a part of the cluster free for a namespace
    Create {
        namespace: String,
        #[command(flatten)]
        limits: New,
    },
    /// Change a claim; what is not given stays as it is
    Update {
        namespace: String,
        claim: String,
        #[command(flatten)]
        limits: Change,
    },
    /// Delete a claim; what it promised is there for others at once
    Delete { namespace: String, claim: String },
    /// Events of a claim
    Events {
        namespace: String,
        claim: String,
        #[command(flatten)]
        which: Which,
    },
}

/// A whole claim.
#[derive(Debug, Args)]
pub struct New {
    /// Processors
    #[arg(long, value_name = "N")]
    cpus: u64,
    /// Memory, in megabytes or with a unit such as 64G
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    memory: u64,
    /// Disk, in gigabytes or with a unit such as 2T
    #[arg(long, value_name = "SIZE", value_parser = gigabytes)]
    disk: u64,
    /// When it ends: 2h, 30d, or a Unix time
    #[arg(long, value_name = "WHEN", value_parser = expiry)]
    expires: f64,
}

/// What of a claim is to change.
#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub struct Change {
    /// Processors
    #[arg(long, value_name = "N")]
    cpus: Option<u64>,
    /// Memory, in megabytes or with a unit such as 64G
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    memory: Option<u64>,
    /// Disk, in gigabytes or with a unit such as 2T
    #[arg(long, value_name = "SIZE", value_parser = gigabytes)]
    disk: Option<u64>,
    /// When it ends: 2h, 30d, or a Unix time
    #[arg(long, value_name = "WHEN", value_parser = expiry)]
    expires: Option<f64>,
}

impl From<New> for Change {
    fn from(new: New) -> Self {
        Self {
            cpus: Some(new.cpus),
            memory: Some(new.memory),
            disk: Some(new.disk),
            expires: Some(new.expires),
        }
    }
}

impl Change {
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
        Command::List { namespace } => session.show(client.claims(&namespace).await?, table),
        Command::Show { namespace, claim } => session.show(client.claim(&namespace, &claim).await?, facts),
        Command::Create { namespace, limits } => {
            let limits = Change::from(limits).limits(now());
            session.show(client.create_claim(&namespace, &limits).await?, facts)
        }
        Command::Update { namespace, claim, limits } => {
            session.show(client.update_claim(&namespace, &claim, &limits.limits(now())).await?, facts)
        }
        Command::Delete { namespace, claim } => {
            let answer = client.delete_claim(&namespace, &claim).await?;
            session.done(&answer, &format!("claim {claim} deleted"))
        }
        Command::Events { namespace, claim, which } => {
            events::show(session, Object::Claim(&namespace, &claim), &which).await
        }
    }
}

/// What is used and what is promised of a part.
fn used(used: i64, limit: i64, unit: &str) -> String {
    format!("{used} of {limit}{unit}")
}

fn table(claims: Vec<ClaimRecord>) -> Table {
    let header = ["UUID", "COVERAGE", "CPUS", "MEMORY", "DISK", "EXPIRES"];
    Table::new(&header, &[]).rows(claims.into_iter().map(|claim| {
        [
            claim.uuid.to_string(),
            claim.coverage_state.to_string(),
            used(claim.used_cpus, claim.limit_cpus, ""),
            used(claim.used_memory_mb, claim.limit_memory_mb, " MB"),
            used(claim.used_disk_gb, claim.limit_disk_gb, " GB"),
            iso(claim.expires_at),
        ]
    }))
}

fn facts(claim: ClaimRecord) -> Table {
    let facts = [
        ("uuid", claim.uuid.to_string()),
        ("namespace", claim.namespace),
        ("coverage", claim.coverage_state.to_string()),
        ("cpus used", used(claim.used_cpus, claim.limit_cpus, "")),
        ("memory used", used(claim.used_memory_mb, claim.limit_memory_mb, " MB")),
        ("disk used", used(claim.used_disk_gb, claim.limit_disk_gb, " GB")),
        ("expires", iso(claim.expires_at)),
        ("updated", iso(claim.updated_at)),
    ];
    Table::facts(facts.map(|(name, value)| (name.to_owned(), value)))
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn a_claim_shows_what_is_used_of_each_part() {
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
        assert!(facts(claims[0].clone()).render(None).contains("60 of 50 GB"));
    }

    #[test]
    fn only_what_is_given_is_sent_and_ends_are_seconds_from_now() {
        let change = Change { cpus: None, memory: Some(2048), disk: None, expires: Some(1060.4) };
        assert_eq!(json!(change.limits(1000.0)), json!({"limit_memory_mb": 2048, "expires_in_seconds": 60}));
    }
}

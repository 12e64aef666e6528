//! `muster label`.

use anyhow::{anyhow, bail};
use clap::Subcommand;
use muster_types::ids::BlobId;

use super::artifact_tables::details;
use super::session::Session;
use crate::api::Client;
use crate::output::escape_control;

/// Commands for labels, which are given as `LABEL`, or `NAMESPACE/LABEL` of another namespace.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Point a label at a blob or at the newest version of an artifact
    Set {
        label: String,
        /// Id of a blob, or name or id of an artifact
        #[arg(value_name = "BLOB|ARTIFACT")]
        target: String,
        /// Number of versions of the label to keep
        #[arg(long, value_name = "N")]
        max_versions: Option<u32>,
    },
    /// Show a label
    Show { label: String },
    /// Delete a label but not its content
    Delete { label: String },
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::Set { label, target, max_versions } => {
            let blob = resolve_blob(client, &target).await?;
            session.show(client.set_label(&label, &blob, max_versions).await?, details)
        }
        Command::Show { label } => session.show(client.label(&label).await?, details),
        Command::Delete { label } => {
            let response = client.delete_label(&label).await?;
            session.confirm(&response, &format!("label {label} deleted"))
        }
    }
}

/// Returns the given blob, or the newest version of the given artifact.
async fn resolve_blob(client: &Client, target: &str) -> anyhow::Result<String> {
    let is_id = target.parse::<BlobId>().is_ok();
    if is_id {
        match client.blob(target).await {
            Ok(response) => return Ok(response.value()?.uuid.to_string()),
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error.into()),
        }
    }
    let artifact = match client.artifact(target.into()).await {
        Ok(response) => response.value()?,
        Err(error) if error.is_not_found() && is_id => {
            bail!("no blob or artifact has the id {target}")
        }
        Err(error) => return Err(error.into()),
    };
    let newest = artifact.blob_uuid;
    let newest =
        newest.ok_or_else(|| anyhow!("artifact {} has no version yet", escape_control(&artifact.name)))?;
    Ok(newest.to_string())
}

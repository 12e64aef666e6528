//! `muster label`.

use anyhow::{anyhow, bail};
use clap::Subcommand;
use muster_types::ids::BlobId;

use super::Session;
use super::artifact::facts;
use crate::api::Client;
use crate::output::visible;

/// The commands about names for content. A label is `LABEL`, or `NAMESPACE/LABEL` of another namespace.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make a label point at a blob or at the newest version of an artifact
    Set {
        label: String,
        /// A blob's id, or an artifact's name or id
        #[arg(value_name = "BLOB|ARTIFACT")]
        target: String,
        /// How many versions of the label are kept
        #[arg(long, value_name = "N")]
        max_versions: Option<u32>,
    },
    /// Show one label
    Show { label: String },
    /// Delete a label; what it points at stays
    Delete { label: String },
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::Set { label, target, max_versions } => {
            let blob = blob(client, &target).await?;
            session.show(client.set_label(&label, &blob, max_versions).await?, facts)
        }
        Command::Show { label } => session.show(client.label(&label).await?, facts),
        Command::Delete { label } => {
            let answer = client.delete_label(&label).await?;
            session.done(&answer, &format!("label {label} deleted"))
        }
    }
}

/// The blob that is meant: itself, or the newest of an artifact.
async fn blob(client: &Client, target: &str) -> anyhow::Result<String> {
    let is_id = target.parse::<BlobId>().is_ok();
    if is_id {
        match client.blob(target).await {
            Ok(answer) => return Ok(answer.value()?.uuid.to_string()),
            Err(error) if error.status() == Some(404) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let artifact = match client.artifact(target.into()).await {
        Ok(answer) => answer.value()?,
        Err(error) if error.status() == Some(404) && is_id => {
            bail!("neither a blob nor an artifact has the id {target}")
        }
        Err(error) => return Err(error.into()),
    };
    let newest = artifact.blob_uuid;
    let newest = newest.ok_or_else(|| anyhow!("artifact {} has no version yet", visible(&artifact.name)))?;
    Ok(newest.to_string())
}

//! `muster issuer`.

use clap::{Args, Subcommand};
use muster_types::event::{EventRecord, EventType};
use muster_types::issuer::{IssuerRecord, IssuerTerms, KEY_FETCH_FAILED};
use muster_types::object::ObjectType;
use serde_json::Value;

use super::events::{self, EventFilter};
use super::list::{ListOptions, ListView};
use super::metadata;
use super::session::Session;
use crate::api::{EventQuery, ObjectPath};
use crate::output::Table;
use crate::time::format_utc;

const LIST: ListView<IssuerRecord> =
    ListView { table, wide: &["state", "uuid"], order: &[], watched: &[ObjectType::Issuer] };

/// Commands for trusted issuers.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the trusted issuers
    List {
        #[command(flatten)]
        list: ListOptions,
    },
    /// Show a trusted issuer
    Show { name: String },
    /// Add a trusted issuer
    Create {
        name: String,
        /// Exact issuer (iss) of its tokens
        #[arg(long, value_name = "URL")]
        issuer_url: String,
        /// HTTPS URL of its signing keys
        #[arg(long, value_name = "URL")]
        jwks_uri: String,
        /// Required audience (aud) of its tokens
        #[arg(long)]
        audience: String,
        /// Check the request without creating anything
        #[arg(long)]
        dry_run: bool,
    },
    /// Change a trusted issuer; options that are not given keep their value
    Update {
        name: String,
        #[command(flatten)]
        changes: IssuerChanges,
    },
    /// Delete a trusted issuer; rules that refer to it are kept
    Delete { name: String },
    /// Show the events of an issuer, newest first
    Events {
        name: String,
        #[command(flatten)]
        filter: EventFilter,
    },
    /// Show the metadata of a trusted issuer
    Metadata { name: String },
    /// Set a metadata key of a trusted issuer
    SetMetadata {
        name: String,
        #[command(flatten)]
        item: metadata::MetadataItem,
    },
    /// Delete a metadata key of a trusted issuer
    DeleteMetadata {
        name: String,
        #[arg(value_name = "KEY")]
        item: String,
    },
}

/// Changes of an issuer.
#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub struct IssuerChanges {
    /// Exact issuer (iss) of its tokens
    #[arg(long, value_name = "URL")]
    issuer_url: Option<String>,
    /// HTTPS URL of its signing keys
    #[arg(long, value_name = "URL")]
    jwks_uri: Option<String>,
    /// Required audience (aud) of its tokens
    #[arg(long)]
    audience: Option<String>,
}

impl IssuerChanges {
    /// Returns the terms of an issuer with the changes applied.
    fn apply_to(self, current: IssuerRecord) -> IssuerTerms {
        IssuerTerms {
            issuer_url: self.issuer_url.unwrap_or(current.issuer_url),
            jwks_uri: self.jwks_uri.unwrap_or(current.jwks_uri),
            audience: self.audience.unwrap_or(current.audience),
        }
    }
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::List { list } => {
            let query = list.query();
            session.list(&list, &LIST, || client.issuers(&query)).await
        }
        Command::Show { name } => {
            let issuer = client.issuer(&name).await?;
            let query = EventQuery {
                limit: Some(1),
                event_type: Some(EventType::Status.to_string()),
                ..EventQuery::default()
            };
            let events = client.events(ObjectPath::Issuer(&name), &query).await?.value()?;
            session.show(issuer, |issuer| details(issuer).rows([key_fetch_row(events.first())]))
        }
        Command::Create { name, issuer_url, jwks_uri, audience, dry_run } => {
            let terms = IssuerTerms { issuer_url, jwks_uri, audience };
            let response = client.with_dry_run(dry_run).create_issuer(&name, &terms).await?;
            session.show_created(response, dry_run, details)
        }
        Command::Update { name, changes } => {
            let terms = changes.apply_to(client.issuer(&name).await?.value()?);
            session.show(client.update_issuer(&name, &terms).await?, details)
        }
        Command::Delete { name } => {
            let response = client.delete_issuer(&name).await?;
            session.confirm(&response, &format!("issuer {name} deleted"))
        }
        Command::Events { name, filter } => events::show(session, ObjectPath::Issuer(&name), &filter).await,
        Command::Metadata { name } => metadata::show(session, ObjectPath::Issuer(&name)).await,
        Command::SetMetadata { name, item } => metadata::set(session, ObjectPath::Issuer(&name), &item).await,
        Command::DeleteMetadata { name, item } => {
            metadata::delete(session, ObjectPath::Issuer(&name), &item).await
        }
    }
}

fn table(issuers: Vec<IssuerRecord>) -> Table {
    Table::new(&["NAME"], &["URL", "KEYS", "AUDIENCE"]).rows(
        issuers.into_iter().map(|issuer| [issuer.name, issuer.issuer_url, issuer.jwks_uri, issuer.audience]),
    )
}

fn details(issuer: IssuerRecord) -> Table {
    let details = [
        ("uuid", issuer.uuid.to_string()),
        ("name", issuer.name),
        ("state", issuer.state.to_string()),
        ("issuer URL", issuer.issuer_url),
        ("keys", issuer.jwks_uri),
        ("audience", issuer.audience),
    ];
    Table::key_values(details.map(|(name, value)| (name.to_owned(), value)))
}

/// Returns the result of the last fetch of the issuer's keys that was recorded.
fn key_fetch_row(event: Option<&EventRecord>) -> [String; 2] {
    let result = match event {
        None => "not fetched yet".to_owned(),
        Some(event) if event.message == KEY_FETCH_FAILED => {
            let reason = event.extra.get("reason").and_then(Value::as_str).unwrap_or("see its events");
            format!("failed at {}: {reason}", format_utc(event.timestamp))
        }
        Some(event) => format!("succeeded at {}", format_utc(event.timestamp)),
    };
    ["key fetch".to_owned(), result]
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    fn example() -> Value {
        json!({ "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "state": "created", "version": 1, "metadata": {},
                "name": "forge", "issuer_url": "https://forge", "jwks_uri": "https://forge/keys", "audience": "cloud" })
    }

    #[test]
    fn lists_issuers() {
        let text = table(from_value(json!([example()])).unwrap()).render(None);
        let expected = "NAME   URL            KEYS                AUDIENCE\n\
                        forge  https://forge  https://forge/keys  cloud\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn shows_all_fields_of_an_issuer() {
        let text = details(from_value(example()).unwrap()).render(None);
        assert!(
            text.contains("issuer URL  https://forge\n") && text.contains("audience    cloud\n"),
            "{text}"
        );
    }

    #[test]
    fn shows_why_the_keys_could_not_be_fetched() {
        assert_eq!(key_fetch_row(None)[1], "not fetched yet");
        let event: EventRecord = from_value(json!({
            "event_uuid": "x", "request_id": null, "timestamp": 0.0, "event_type": "status", "type": "status",
            "message": KEY_FETCH_FAILED, "extra": {"reason": "timed out after 5 seconds"}, "node": "a", "fqdn": "a",
            "duration": null
        }))
        .unwrap();
        let shown = &key_fetch_row(Some(&event))[1];
        assert!(shown.starts_with("failed at 1970-01-01"), "{shown}");
        assert!(shown.ends_with(": timed out after 5 seconds"), "{shown}");
    }

    #[test]
    fn update_keeps_unchanged_terms() {
        let changes = IssuerChanges { issuer_url: None, jwks_uri: None, audience: Some("other".into()) };
        let terms = changes.apply_to(from_value(example()).unwrap());
        assert_eq!((terms.issuer_url.as_str(), terms.audience.as_str()), ("https://forge", "other"));
    }
}

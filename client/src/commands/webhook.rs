//! `muster webhook`.

use clap::{Args, Subcommand};
use muster_types::event::EventType;
use muster_types::object::ObjectType;
use muster_types::webhook::{DEFAULT_SECRET_OVERLAP, DeliveryRecord, WebhookRecord};
use serde_json::{Value, json};

use super::list::{ListOptions, ListView};
use super::session::Session;
use crate::api::ApiResponse;
use crate::output::{self, Table, escape_control, or_dash};
use crate::time::format_utc;

const LIST: ListView<WebhookRecord> =
    ListView { table, wide: &["event_types", "object_types", "message_prefix"], order: &[], watched: &[] };

const DELIVERIES: ListView<DeliveryRecord> =
    ListView { table: deliveries_table, wide: &[], order: &[], watched: &[] };

/// Commands for webhooks, to which the events of a namespace are sent.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the webhooks of a namespace
    List {
        namespace: String,
        #[command(flatten)]
        list: ListOptions,
    },
    /// Show a webhook and the state of its last deliveries
    Show { namespace: String, name: String },
    /// Add a webhook; prints its secret
    Create {
        namespace: String,
        name: String,
        /// URL that events are sent to
        url: String,
        #[command(flatten)]
        filters: Filters,
        /// Create it disabled
        #[arg(long)]
        disabled: bool,
        /// Check the request without creating anything
        #[arg(long)]
        dry_run: bool,
    },
    /// Change a webhook; options that are not given keep their value
    Update {
        namespace: String,
        name: String,
        #[command(flatten)]
        changes: Changes,
    },
    /// Delete a webhook; nothing is sent any longer
    Delete { namespace: String, name: String },
    /// Replace the secret of a webhook; prints the new one
    RotateSecret {
        namespace: String,
        name: String,
        /// For how long deliveries are signed with the previous secret, too; 0 if it has leaked
        #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_SECRET_OVERLAP)]
        overlap: i64,
    },
    /// Show the deliveries of a webhook, newest first
    Deliveries {
        namespace: String,
        name: String,
        #[command(flatten)]
        list: ListOptions,
    },
    /// Send a delivery again
    Redeliver { namespace: String, name: String, delivery: String },
    /// Send a test to the receiver; `deliveries` shows its result
    Test { namespace: String, name: String },
}

/// Which events are sent.
#[derive(Debug, Args)]
pub struct Filters {
    /// Type of events that are sent, such as status; audit, mutate and status if not given
    #[arg(long = "event-type", value_name = "TYPE")]
    event_types: Vec<EventType>,
    /// Type of objects whose events are sent, such as instance; all of the namespace if not given
    #[arg(long = "object-type", value_name = "TYPE")]
    object_types: Vec<ObjectType>,
    /// Send only events whose message starts with this text
    #[arg(long, value_name = "TEXT")]
    message_prefix: Option<String>,
}

impl Filters {
    /// Adds the filters that were given to the body of a request.
    fn add_to(self, terms: &mut Value) {
        if !self.event_types.is_empty() {
            terms["event_types"] = json!(self.event_types);
        }
        if !self.object_types.is_empty() {
            terms["object_types"] = json!(self.object_types);
        }
        if let Some(prefix) = self.message_prefix {
            terms["message_prefix"] = json!(prefix);
        }
    }
}

/// Changes of a webhook.
#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub struct Changes {
    /// URL that events are sent to
    #[arg(long)]
    url: Option<String>,
    /// Type of events that are sent; replaces all previous ones
    #[arg(long = "event-type", value_name = "TYPE")]
    event_types: Vec<EventType>,
    /// Type of objects whose events are sent; replaces all previous ones
    #[arg(long = "object-type", value_name = "TYPE")]
    object_types: Vec<ObjectType>,
    /// Send only events whose message starts with this text; all if it is empty
    #[arg(long, value_name = "TEXT")]
    message_prefix: Option<String>,
    /// Send events
    #[arg(long, conflicts_with = "disable")]
    enable: bool,
    /// Do not send events until it is enabled again
    #[arg(long)]
    disable: bool,
}

impl Changes {
    /// Returns the terms of a webhook with the changes applied.
    fn apply_to(self, current: WebhookRecord) -> Value {
        let mut terms = json!({
            "url": self.url.unwrap_or(current.url),
            "event_types": current.event_types,
            "object_types": current.object_types,
            "message_prefix": current.message_prefix,
            "enabled": self.enable || current.enabled && !self.disable,
        });
        let Self { event_types, object_types, message_prefix, .. } = self;
        Filters { event_types, object_types, message_prefix }.add_to(&mut terms);
        terms
    }
}

pub(super) async fn run(command: Command, session: &Session) -> anyhow::Result<()> {
    let client = &session.client;
    match command {
        Command::List { namespace, list } => {
            let query = list.query();
            session.list(&list, &LIST, || client.webhooks(&namespace, &query)).await
        }
        Command::Show { namespace, name } => session.show(client.webhook(&namespace, &name).await?, details),
        Command::Create { namespace, name, url, filters, disabled, dry_run } => {
            let mut terms = json!({ "url": url, "enabled": !disabled });
            filters.add_to(&mut terms);
            let response = client.with_dry_run(dry_run).create_webhook(&namespace, &name, terms).await?;
            // The secret of a webhook that does not exist is of no use.
            if dry_run {
                return session.show_created(response, dry_run, details);
            }
            show_secret(session, response)
        }
        Command::Update { namespace, name, changes } => {
            let terms = changes.apply_to(client.webhook(&namespace, &name).await?.value()?);
            session.show(client.update_webhook(&namespace, &name, terms).await?, details)
        }
        Command::Delete { namespace, name } => {
            let response = client.delete_webhook(&namespace, &name).await?;
            session.confirm(&response, &format!("webhook {name} deleted"))
        }
        Command::RotateSecret { namespace, name, overlap } => {
            show_secret(session, client.rotate_webhook_secret(&namespace, &name, overlap).await?)
        }
        Command::Deliveries { namespace, name, list } => {
            let query = list.query();
            session.list(&list, &DELIVERIES, || client.webhook_deliveries(&namespace, &name, &query)).await
        }
        Command::Redeliver { namespace, name, delivery } => {
            let response = client.redeliver(&namespace, &name, &delivery).await?;
            session.confirm(&response, &format!("delivery {delivery} queued"))
        }
        Command::Test { namespace, name } => {
            session.show(client.test_webhook(&namespace, &name).await?, |test| deliveries_table(vec![test]))
        }
    }
}

/// Prints only the secret to the standard output.
fn show_secret(session: &Session, response: ApiResponse<WebhookRecord>) -> anyhow::Result<()> {
    if session.is_structured() {
        return session.print_value(response.json());
    }
    let webhook = response.value()?;
    output::print(&format!("{}\n", webhook.secret.unwrap_or_default()))?;
    crate::message!(
        "this is the secret of webhook {}; it will not be shown again",
        escape_control(&webhook.name)
    );
    Ok(())
}

fn names(types: &[impl ToString]) -> String {
    types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn time(time: Option<f64>) -> String {
    time.map_or_else(|| "-".to_owned(), format_utc)
}

fn table(webhooks: Vec<WebhookRecord>) -> Table {
    let fixed = &["NAME", "ENABLED", "PENDING", "DROPPED", "LAST DELIVERED"];
    Table::new(fixed, &["URL", "LAST ERROR"]).rows(webhooks.into_iter().map(|webhook| {
        // An error that was followed by a success is over.
        let has_failed = webhook.last_failed > webhook.last_delivered;
        [
            webhook.name,
            if webhook.enabled { "yes" } else { "no" }.to_owned(),
            webhook.pending.to_string(),
            webhook.dropped.to_string(),
            time(webhook.last_delivered),
            webhook.url,
            or_dash(webhook.last_error.filter(|_| has_failed).unwrap_or_default()),
        ]
    }))
}

fn details(webhook: WebhookRecord) -> Table {
    let details = [
        ("uuid", webhook.uuid.to_string()),
        ("namespace", webhook.namespace),
        ("name", webhook.name),
        ("url", webhook.url),
        ("enabled", if webhook.enabled { "yes" } else { "no" }.to_owned()),
        ("event types", names(&webhook.event_types)),
        ("object types", names(&webhook.object_types)),
        ("message prefix", or_dash(webhook.message_prefix.unwrap_or_default())),
        ("previous secret expires", time(webhook.previous_secret_expires)),
        ("pending", webhook.pending.to_string()),
        ("dropped", webhook.dropped.to_string()),
        ("last delivered", time(webhook.last_delivered)),
        ("last failed", time(webhook.last_failed)),
        ("last error", or_dash(webhook.last_error.unwrap_or_default())),
    ];
    Table::key_values(details.map(|(name, value)| (name.to_owned(), value)))
}

fn deliveries_table(deliveries: Vec<DeliveryRecord>) -> Table {
    let fixed = &["DELIVERY", "CREATED", "STATE", "ATTEMPTS", "NEXT ATTEMPT", "STATUS"];
    Table::new(fixed, &["EVENT", "ERROR"]).rows(deliveries.into_iter().map(|delivery| {
        [
            delivery.uuid.to_string(),
            format_utc(delivery.created),
            delivery.state.to_string(),
            delivery.attempts.to_string(),
            time(delivery.next_attempt),
            delivery.response_status.map_or_else(|| "-".to_owned(), |status| status.to_string()),
            format!("{} {}: {}", delivery.object_type, delivery.object_uuid, delivery.message),
            or_dash(delivery.error.unwrap_or_default()),
        ]
    }))
}

#[cfg(test)]
mod tests {
    use serde_json::from_value;

    use super::*;

    fn example() -> Value {
        json!({ "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", "namespace": "ci", "name": "chat",
                "url": "https://hooks.example", "enabled": true, "event_types": ["audit", "status"],
                "object_types": ["instance"], "message_prefix": "state", "secret": null,
                "previous_secret_expires": null, "pending": 2, "dropped": 0, "last_delivered": 1_767_225_600.0,
                "last_failed": 1_767_225_500.0, "last_error": "cannot connect to hooks.example" })
    }

    #[test]
    fn lists_webhooks_without_errors_that_are_over() {
        let text = table(from_value(json!([example()])).unwrap()).render(None);
        assert!(text.contains("chat") && text.contains("https://hooks.example"), "{text}");
        assert!(!text.contains("cannot connect"), "{text}");
        let mut failing = example();
        failing["last_failed"] = json!(1_767_225_700.0);
        let text = table(from_value(json!([failing])).unwrap()).render(None);
        assert!(text.contains("cannot connect"), "{text}");
    }

    #[test]
    fn lists_deliveries_with_their_last_result() {
        let delivery = json!({ "uuid": "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a02", "event_uuid": "e", "event_type": "audit",
            "message": "state is now created", "object_type": "instance", "object_uuid": "i", "state": "pending",
            "attempts": 2, "created": 1_767_225_600.0, "next_attempt": 1_767_225_700.0, "finished": null,
            "response_status": 500, "error": "the receiver responded with 500" });
        let text = deliveries_table(vec![from_value(delivery).unwrap()]).render(None);
        assert!(text.contains("pending") && text.contains("instance i: state is now created"), "{text}");
        assert!(text.contains("the receiver responded with 500"), "{text}");
    }

    #[test]
    fn update_keeps_unchanged_terms() {
        let changes = Changes {
            url: None,
            event_types: vec![EventType::Usage],
            object_types: vec![],
            message_prefix: None,
            enable: false,
            disable: true,
        };
        assert_eq!(
            changes.apply_to(from_value(example()).unwrap()),
            json!({ "url": "https://hooks.example", "event_types": ["usage"], "object_types": ["instance"],
                    "message_prefix": "state", "enabled": false })
        );
    }
}

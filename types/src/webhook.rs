//! Webhooks: where the events of a namespace are sent. See docs/decisions/0089.
//!
//! A delivery is one event for one webhook:
//!
//! ```text
//!             ┌──2xx──────────────────────▶ delivered ─┐
//! pending ────┼──all attempts have failed─▶ failed ────┼──after some days──▶ (row removed)
//!    ▲        └──the queue is full────────▶ dropped ───┤
//!    └────────────────redelivery───────────────────────┘
//! ```

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::event::EventType;
use crate::ids::{DeliveryId, WebhookId};
use crate::key::{Secret, random_alphanumeric};
use crate::object::{ObjectType, check_path_segment, string_enum};
use crate::{Error, Result};

/// The prefix of secrets, for scanners of leaked ones.
const SECRET_PREFIX: &str = "whsec_";
const SECRET_LENGTH: usize = 40;
/// The maximum length of the name of a webhook, in characters.
const MAX_NAME_LENGTH: usize = 64;
/// The maximum length of a URL, in characters.
const MAX_URL_LENGTH: usize = 1024;
/// The maximum length of the prefix of messages, in characters.
const MAX_PREFIX_LENGTH: usize = 128;
/// How long the previous secret signs deliveries by default, and at most, in seconds.
pub const DEFAULT_SECRET_OVERLAP: i64 = 86_400;
pub const MAX_SECRET_OVERLAP: i64 = 7 * 86_400;

/// The types of events that are sent by default. The others are frequent.
pub const DEFAULT_EVENT_TYPES: &[EventType] = &[EventType::Audit, EventType::Mutate, EventType::Status];

/// The seconds between the attempts of a delivery, without the random part. After the last one it has failed.
pub const RETRY_DELAYS: &[f64] =
    &[10.0, 30.0, 120.0, 600.0, 1800.0, 3600.0, 7200.0, 14_400.0, 21_600.0, 36_000.0];

string_enum! {
    /// The lifecycle of a delivery.
    DeliveryState {
        /// It is sent when its next attempt is due.
        Pending = "pending",
        /// The receiver has accepted it with a status of 200 to 299.
        Delivered = "delivered",
        /// All attempts have failed.
        Failed = "failed",
        /// The webhook had too many pending deliveries.
        Dropped = "dropped",
    }
}

impl DeliveryState {
    /// Returns whether a delivery may change from this state to `next`.
    #[must_use]
    pub fn can_transition_to(self, next: Self) -> bool {
        match (self, next) {
            (Self::Pending, Self::Delivered | Self::Failed | Self::Dropped)
            | (Self::Delivered | Self::Failed | Self::Dropped, Self::Pending) => true,
            (Self::Pending, Self::Pending)
            | (
                Self::Delivered | Self::Failed | Self::Dropped,
                Self::Delivered | Self::Failed | Self::Dropped,
            ) => false,
        }
    }
}

/// Which events a webhook sends, and where.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WebhookTerms {
    pub url: String,
    pub event_types: Vec<EventType>,
    pub object_types: Vec<ObjectType>,
    /// Only events whose message starts with this text.
    pub message_prefix: Option<String>,
    pub enabled: bool,
}

/// A webhook as the API returns it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WebhookRecord {
    /// UUID of the webhook.
    pub uuid: WebhookId,
    /// The namespace whose events are sent.
    pub namespace: String,
    /// The name of the webhook, unique in its namespace.
    pub name: String,
    /// The URL that events are sent to.
    pub url: String,
    /// Whether events are sent.
    pub enabled: bool,
    /// The types of events that are sent.
    pub event_types: Vec<EventType>,
    /// The types of objects whose events are sent.
    pub object_types: Vec<ObjectType>,
    /// Only events whose message starts with this text are sent; `null` for all.
    pub message_prefix: Option<String>,
    /// The secret that signs deliveries. Only in the responses that create or rotate it, otherwise `null`.
    pub secret: Option<String>,
    /// Unix time until which the previous secret signs deliveries, too; `null` without one.
    pub previous_secret_expires: Option<f64>,
    /// The number of deliveries that are not finished.
    pub pending: i64,
    /// The number of deliveries that were dropped because too many were pending.
    pub dropped: i64,
    /// Unix time of the last attempt that succeeded.
    pub last_delivered: Option<f64>,
    /// Unix time of the last attempt that failed.
    pub last_failed: Option<f64>,
    /// Why that attempt failed.
    pub last_error: Option<String>,
}

/// A delivery as the API returns it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DeliveryRecord {
    /// UUID of the delivery, the header `Muster-Delivery`.
    pub uuid: DeliveryId,
    /// UUID of the event; of a test, that of the delivery.
    pub event_uuid: String,
    /// The type of the event.
    pub event_type: EventType,
    /// The message of the event.
    pub message: String,
    /// The type of the object that the event is about.
    pub object_type: ObjectType,
    /// UUID of the object; the name of a namespace.
    pub object_uuid: String,
    /// The state of the delivery.
    pub state: DeliveryState,
    /// The number of attempts, since the last redelivery.
    pub attempts: i64,
    /// Unix time at which the delivery was queued.
    pub created: f64,
    /// Unix time of the next attempt; `null` if the delivery is finished.
    pub next_attempt: Option<f64>,
    /// Unix time at which the delivery was finished.
    pub finished: Option<f64>,
    /// The status of the last response; `null` if there was none.
    pub response_status: Option<i64>,
    /// Why the last attempt failed, or the delivery was dropped.
    pub error: Option<String>,
}

/// Generates the secret of a webhook.
#[must_use]
pub fn generate_secret() -> Secret {
    Secret::new(format!("{SECRET_PREFIX}{}", random_alphanumeric(SECRET_LENGTH)))
}

/// Checks the name of a new webhook.
pub fn check_name(name: &str) -> Result<()> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if name.is_empty() || name.len() > MAX_NAME_LENGTH || !name.chars().all(is_plain) {
        return Err(Error::Invalid(format!(
            "name: must have 1 to {MAX_NAME_LENGTH} ASCII letters, digits, dots, hyphens or underscores"
        )));
    }
    check_path_segment("name", name)
}

/// Checks the length of a URL.
pub fn check_url_length(url: &str) -> Result<()> {
    if url.chars().count() > MAX_URL_LENGTH {
        return Err(Error::TooLong(format!("url: cannot be longer than {MAX_URL_LENGTH} characters")));
    }
    Ok(())
}

/// Checks the prefix of messages. An empty prefix means that it is not set.
pub fn check_message_prefix(prefix: Option<String>) -> Result<Option<String>> {
    let prefix = prefix.filter(|prefix| !prefix.is_empty());
    if prefix.as_ref().is_some_and(|prefix| prefix.chars().count() > MAX_PREFIX_LENGTH) {
        let text = format!("message_prefix: cannot be longer than {MAX_PREFIX_LENGTH} characters");
        return Err(Error::TooLong(text));
    }
    Ok(prefix)
}

/// Checks for how long the previous secret is to sign deliveries, in seconds.
pub fn check_secret_overlap(seconds: Option<i64>) -> Result<i64> {
    let seconds = seconds.unwrap_or(DEFAULT_SECRET_OVERLAP);
    if !(0..=MAX_SECRET_OVERLAP).contains(&seconds) {
        return Err(Error::Invalid(format!("overlap: must be between 0 and {MAX_SECRET_OVERLAP} seconds")));
    }
    Ok(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_long_and_differ() {
        let (one, other) = (generate_secret(), generate_secret());
        assert_ne!(one, other);
        assert!(one.expose().starts_with("whsec_") && one.expose().len() == 46, "{}", one.expose());
    }

    #[test]
    fn rejects_names_that_cannot_be_path_segments() {
        for name in ["", "a b", "a/b", "é", ".", "..", &"a".repeat(65)] {
            assert!(check_name(name).is_err(), "{name}");
        }
        assert!(check_name(&"a".repeat(64)).is_ok() && check_name("chat-ops.v1_2").is_ok());
    }

    #[test]
    fn attempts_span_about_a_day() {
        let hours = RETRY_DELAYS.iter().sum::<f64>() / 3600.0;
        assert!((23.0..25.0).contains(&hours), "{hours}");
    }

    #[test]
    fn limits_the_overlap_of_secrets() {
        assert_eq!(check_secret_overlap(None).unwrap(), DEFAULT_SECRET_OVERLAP);
        assert_eq!(check_secret_overlap(Some(0)).unwrap(), 0);
        assert!(check_secret_overlap(Some(-1)).is_err());
        assert!(check_secret_overlap(Some(MAX_SECRET_OVERLAP + 1)).is_err());
    }

    #[test]
    fn finished_deliveries_can_only_be_sent_again() {
        for state in [DeliveryState::Delivered, DeliveryState::Failed, DeliveryState::Dropped] {
            assert!(
                DeliveryState::Pending.can_transition_to(state)
                    && state.can_transition_to(DeliveryState::Pending)
            );
            assert!(!state.can_transition_to(DeliveryState::Delivered));
        }
    }
}

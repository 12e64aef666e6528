//! Values of columns and statement parameters.

use std::net::Ipv4Addr;
use std::str::FromStr;

use muster_types::{
    address, agent_operation, artifact, blob, event, idempotency, ids, instance, interface, issuer, key,
    namespace, network, node, object, operation, quota, replica, rule, session, webhook,
};

use crate::error::StoreError;

/// A value of a column or of a statement parameter.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Null,
    Int(i64),
    Real(f64),
    Text(String),
    Bytes(Vec<u8>),
}

/// A type that a column can be read as.
pub trait FromValue: Sized {
    /// Converts a column's value, or returns it unchanged if it is not a `Self`.
    fn from_value(value: Value) -> Result<Self, Value>;
}

macro_rules! impl_from_for_value {
    ($($type:ty => |$v:ident| $e:expr),+ $(,)?) => {$(
        impl From<$type> for Value {
            fn from($v: $type) -> Self { $e }
        }
    )+};
}
impl_from_for_value! {
    i64 => |v| Self::Int(v),
    u16 => |v| Self::Int(i64::from(v)),
    u32 => |v| Self::Int(i64::from(v)),
    bool => |v| Self::Int(i64::from(v)),
    f64 => |v| Self::Real(v),
    String => |v| Self::Text(v),
    &String => |v| Self::Text(v.clone()),
    &str => |v| Self::Text(v.to_owned()),
    Ipv4Addr => |v| Self::Text(v.to_string()),
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

/// Stores types as the text that they are displayed as and parsed from.
macro_rules! impl_text_value {
    ($($type:ty),+ $(,)?) => {$(
        impl From<$type> for Value {
            fn from(value: $type) -> Self { Self::Text(value.to_string()) }
        }

        impl FromValue for $type {
            fn from_value(value: Value) -> Result<Self, Value> { parse(value) }
        }
    )+};
}
impl_text_value!(
    ids::KeyId,
    ids::ClaimId,
    ids::NodeId,
    ids::OperationId,
    ids::NetworkId,
    ids::InterfaceId,
    ids::InstanceId,
    ids::BlobId,
    ids::ArtifactId,
    ids::UploadId,
    ids::AgentOperationId,
    ids::IssuerId,
    ids::RuleId,
    ids::WebhookId,
    ids::DeliveryId,
    agent_operation::AgentOperationState,
    agent_operation::ExpiryReason,
    artifact::ArtifactState,
    artifact::ArtifactType,
    blob::BlobState,
    blob::CopyState,
    address::AddressType,
    address::MacAddress,
    address::Netblock,
    instance::InstanceState,
    instance::PowerState,
    interface::InterfaceState,
    issuer::IssuerState,
    network::NetworkState,
    object::ObjectType,
    event::EventType,
    key::KeyState,
    namespace::NamespaceState,
    node::NodeState,
    operation::OperationState,
    operation::OperationType,
    quota::QuotaName,
    replica::ReplicaState,
    rule::RuleState,
    session::TicketPurpose,
    idempotency::IdempotencyState,
    webhook::DeliveryState,
);

fn parse<T: FromStr>(value: Value) -> Result<T, Value> {
    match value {
        Value::Text(text) => text.parse().map_err(|_| Value::Text(text)),
        other => Err(other),
    }
}

/// In a [`Union`](crate::union::Union), MariaDB returns numbers as text.
impl FromValue for i64 {
    fn from_value(value: Value) -> Result<Self, Value> {
        match value {
            Value::Int(n) => Ok(n),
            other => parse(other),
        }
    }
}

macro_rules! impl_from_value_for_integer {
    ($($type:ty),+) => {$(
        impl FromValue for $type {
            fn from_value(value: Value) -> Result<Self, Value> {
                i64::from_value(value).and_then(|n| Self::try_from(n).map_err(|_| Value::Int(n)))
            }
        }
    )+};
}
impl_from_value_for_integer!(u16, u32, u64, usize);

impl FromValue for bool {
    fn from_value(value: Value) -> Result<Self, Value> {
        i64::from_value(value).map(|n| n != 0)
    }
}

impl FromValue for f64 {
    #[expect(clippy::cast_precision_loss, reason = "integers in a DOUBLE column are times and counts")]
    fn from_value(value: Value) -> Result<Self, Value> {
        match value {
            Value::Real(n) => Ok(n),
            Value::Int(n) => Ok(n as Self),
            other => parse(other),
        }
    }
}

impl FromValue for String {
    fn from_value(value: Value) -> Result<Self, Value> {
        match value {
            Value::Text(text) => Ok(text),
            other => Err(other),
        }
    }
}

/// Addresses are stored as numbers where their order matters and as text elsewhere.
impl FromValue for Ipv4Addr {
    fn from_value(value: Value) -> Result<Self, Value> {
        match value {
            Value::Int(_) => u32::from_value(value).map(Self::from),
            other => parse(other),
        }
    }
}

impl<T: FromValue> FromValue for Option<T> {
    fn from_value(value: Value) -> Result<Self, Value> {
        match value {
            Value::Null => Ok(None),
            other => T::from_value(other).map(Some),
        }
    }
}

/// A value that is stored as a JSON document. NULL is read as JSON's `null`.
#[derive(Debug, Clone, PartialEq)]
pub struct Json<T>(pub T);

impl<T: serde::de::DeserializeOwned> FromValue for Json<T> {
    fn from_value(value: Value) -> Result<Self, Value> {
        match value {
            Value::Null => serde_json::from_str("null").map(Self).map_err(|_| Value::Null),
            Value::Text(text) => serde_json::from_str(&text).map(Self).map_err(|_| Value::Text(text)),
            other => Err(other),
        }
    }
}

/// Returns the JSON document that a column stores for `value`.
pub(crate) fn to_json(value: &impl serde::Serialize) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|error| StoreError::Internal(error.to_string()))
}

/// Converts each expression into a [`Value`] and returns them as an array.
#[macro_export]
macro_rules! values {
    ($($value:expr),* $(,)?) => { [$($crate::Value::from($value)),*] };
}

/// Converts the parameters of a statement into a slice of [`Value`]s.
#[macro_export]
macro_rules! params {
    ($($value:expr),* $(,)?) => { &$crate::values![$($value),*] };
}

/// Returns `count` parameter placeholders, separated by commas.
pub(crate) fn placeholders(count: usize) -> String {
    vec!["?"; count].join(", ")
}

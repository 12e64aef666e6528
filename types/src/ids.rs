//! Typed identifiers, one type per kind of object.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
        #[serde(transparent)]
        pub struct $name(pub Uuid);

        impl $name {
            /// Creates a random id.
            #[must_use]
            #[expect(clippy::new_without_default, reason = "a default must not be random")]
            pub fn new() -> Self {
                Self(Uuid::new_v4())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.hyphenated().fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = uuid::Error;

            /// Parses every notation of a UUID that clients use: with or without hyphens, in braces, or as a URN.
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Uuid::try_parse(text).map(Self)
            }
        }
    )+};
}

ids! {
    /// A namespace key. Namespaces themselves are identified by their name.
    KeyId,
    /// A capacity claim of a namespace.
    ClaimId,
    /// A node of the cluster.
    NodeId,
    /// A cluster operation.
    OperationId,
    /// A virtual network.
    NetworkId,
    /// A network interface of an instance.
    InterfaceId,
    /// An instance.
    InstanceId,
    /// A blob.
    BlobId,
    /// An artifact.
    ArtifactId,
    /// An upload in progress.
    UploadId,
    /// An operation that an agent runs inside a guest.
    AgentOperationId,
    /// A trusted issuer of identity tokens.
    IssuerId,
    /// A mapping rule, which exchanges identity tokens for keys.
    RuleId,
    /// A webhook of a namespace.
    WebhookId,
    /// A delivery of an event to a webhook.
    DeliveryId,
    /// A cluster: all daemons that share one database.
    ClusterId,
    /// A storage that several hosts have mounted.
    StorageId,
}

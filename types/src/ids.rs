//! Typed identifiers: an operation's id does not fit where a node's is wanted.

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
            /// A fresh random id.
            #[must_use]
            #[expect(clippy::new_without_default, reason = "a default id would be a different one each time")]
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

            /// Accepts every spelling of a UUID that the clients use: with or without hyphens,
            /// in braces, or as a URN.
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Uuid::try_parse(text).map(Self)
            }
        }
    )+};
}

ids! {
    /// A namespace key. Namespaces themselves are identified by their name.
    KeyId,
    /// What a namespace was promised of the cluster.
    ClaimId,
    /// A node of the cluster.
    NodeId,
    /// A cluster operation.
    OperationId,
    /// A virtual network.
    NetworkId,
    /// A network interface of an instance.
    InterfaceId,
    /// A virtual machine.
    InstanceId,
    /// A piece of content.
    BlobId,
    /// Something with versions, each of which is a blob.
    ArtifactId,
    /// Content on its way in.
    UploadId,
    /// Something to be done inside a guest.
    AgentOperationId,
    /// Somebody whose tokens can be exchanged for keys.
    IssuerId,
    /// What such a token can be exchanged for.
    RuleId,
}

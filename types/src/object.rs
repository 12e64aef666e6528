//! Object types and references: the subjects of events, metadata and operations.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Error, Result};

/// Declares an enum whose variants have fixed strings in the API and the database.
macro_rules! string_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $string:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
        pub enum $name { $($(#[$vdoc])* #[serde(rename = $string)] $variant),+ }

        impl $name {
            /// All variants, in declaration order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Returns the string of the API and the database.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $string),+ }
            }
        }

        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl ::std::str::FromStr for $name {
            type Err = String;
            fn from_str(text: &str) -> ::std::result::Result<Self, String> {
                match text {
                    $($string => Ok(Self::$variant),)+
                    other => Err(format!("{other:?} is not a valid {}", stringify!($name))),
                }
            }
        }
    };
}
pub(crate) use string_enum;

string_enum! {
    /// The kinds of objects.
    ObjectType {
        /// An API request; its id is the request id.
        ApiRequest = "api-requests",
        /// A namespace; its id is its name.
        Namespace = "namespace",
        /// A key of a namespace.
        NamespaceKey = "namespace_key",
        /// A capacity claim of a namespace.
        NamespaceClaim = "namespace_claim",
        /// A node of the cluster.
        Node = "node",
        /// A virtual network.
        Network = "network",
        /// An interface of an instance on a network.
        Interface = "interface",
        /// An instance.
        Instance = "instance",
        /// An artifact, whose versions are blobs.
        Artifact = "artifact",
        /// An immutable content.
        Blob = "blob",
        /// An upload in progress.
        Upload = "upload",
        /// A queued operation.
        ClusterOperation = "clusteroperation",
        /// An operation that an agent runs inside a guest.
        AgentOperation = "agentoperation",
        /// A trusted issuer of identity tokens.
        Issuer = "trusted_issuer",
        /// A rule that exchanges identity tokens for keys.
        Rule = "mapping_rule",
    }
}

/// The subject of an event, metadata, a reference or an operation.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ObjectRef {
    #[serde(rename = "t")]
    pub object_type: ObjectType,
    #[serde(rename = "i")]
    pub id: String,
}

impl ObjectRef {
    pub fn new(object_type: ObjectType, id: impl fmt::Display) -> Self {
        Self { object_type, id: id.to_string() }
    }

    #[must_use]
    pub fn namespace(name: &str) -> Self {
        Self::new(ObjectType::Namespace, name)
    }
}

/// A path segment that names an object: a UUID or a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NameOrId<Id> {
    Id(Id),
    Name(String),
}

impl<Id: FromStr> NameOrId<Id> {
    #[must_use]
    pub fn parse(text: &str) -> Self {
        text.parse().map_or_else(|_| Self::Name(text.to_owned()), Self::Id)
    }
}

/// Checks that a name can be stored and be a path segment. See docs/decisions/0008.
pub fn check_name(field: &str, name: &str) -> Result<()> {
    let bad = |why: &str| Err(Error::Invalid(format!("{field}: {why}")));
    if name.is_empty() {
        return bad("must not be empty");
    }
    if name.chars().count() > 255 {
        return bad("must be at most 255 characters");
    }
    if name.chars().any(|c| c.is_control() || c == '/') {
        return bad("must not contain slashes or control characters");
    }
    if name.trim() != name {
        return bad("must not start or end with white space");
    }
    check_path_segment(field, name)
}

/// Rejects `.` and `..`, which clients resolve to another path.
pub fn check_path_segment(field: &str, name: &str) -> Result<()> {
    if name == "." || name == ".." {
        return Err(Error::Invalid(format!("{field}: must not be a dot segment")));
    }
    Ok(())
}

/// A recorded relationship between two objects (`references_to`, `references_from`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Reference {
    pub source_object_type: String,
    pub source_uuid: String,
    pub relationship: String,
    pub relationship_value: Option<String>,
    pub target_object_type: String,
    pub target_uuid: String,
    /// Unix time.
    pub created: f64,
    /// Unix time.
    pub last_active: f64,
}

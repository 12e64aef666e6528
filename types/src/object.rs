//! Object types and references: the subjects of events, metadata and operations.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};

use crate::{Error, Result};

/// Declares an enum whose variants have fixed strings in the API, its document and the database.
macro_rules! string_enum {
    ($(#[doc = $doc:literal])* $name:ident {
        $($(#[doc = $vdoc:literal])* $variant:ident = $string:literal),+ $(,)?
    }) => {
        $(#[doc = $doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum $name { $($(#[doc = $vdoc])* #[serde(rename = $string)] $variant),+ }

        // Not derived: `utoipa` does not find the strings of attributes that a macro generates.
        impl ::utoipa::PartialSchema for $name {
            fn schema() -> ::utoipa::openapi::RefOr<::utoipa::openapi::schema::Schema> {
                let values: &[(&str, &[&str])] = &[$(($string, &[$($vdoc),*])),+];
                $crate::object::enum_schema(&[$($doc),*], values)
            }
        }

        impl ::utoipa::ToSchema for $name {}

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
                    other => Err(format!("{other:?} is not valid: must be one of {}", [$($string),+].join(", "))),
                }
            }
        }
    };
}
pub(crate) use string_enum;

/// Returns the schema of an enum with these strings. `doc` and the second parts of `values` are lines of doc comments.
pub(crate) fn enum_schema(doc: &[&str], values: &[(&str, &[&str])]) -> RefOr<Schema> {
    let join = |lines: &[&str]| lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
    let mut description = join(doc);
    for (value, doc) in values.iter().filter(|(_, doc)| !doc.is_empty()) {
        description += &format!("\n- `{value}`: {}", join(doc));
    }
    ObjectBuilder::new()
        .schema_type(Type::String)
        .description(Some(description))
        .enum_values(Some(values.iter().map(|(value, _)| *value)))
        .build()
        .into()
}

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
    /// The type of the object that refers to the other one.
    pub source_object_type: String,
    /// The id of the object that refers to the other one.
    pub source_uuid: String,
    /// What the relationship means, such as `instance_disk`.
    pub relationship: String,
    /// Details of the relationship, such as a device.
    pub relationship_value: Option<String>,
    /// The type of the object that is referred to.
    pub target_object_type: String,
    /// The id of the object that is referred to.
    pub target_uuid: String,
    /// Unix time.
    pub created: f64,
    /// Unix time.
    pub last_active: f64,
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::address::AddressType;
    use crate::agent_operation::{AgentOperationState, ExpiryReason};
    use crate::artifact::{ArtifactState, ArtifactType};
    use crate::blob::{BlobState, Compression, CopyState, HashAlgorithm, ImageFormat};
    use crate::claim::{ClaimState, CoverageState};
    use crate::event::EventType;
    use crate::guest::OutputName;
    use crate::host_check::CheckState;
    use crate::instance::{ConfigDriveType, InstanceState, MachineType, PowerState, SideChannel};
    use crate::interface::InterfaceState;
    use crate::issuer::IssuerState;
    use crate::key::KeyState;
    use crate::namespace::NamespaceState;
    use crate::network::NetworkState;
    use crate::node::{HostFeature, NodeState};
    use crate::object::ObjectType;
    use crate::operation::{OperationState, OperationType};
    use crate::rule::RuleState;
    use crate::scheduling::SchedulingStage;
    use crate::spec::{DiskBus, DiskType, Vdi};
    use crate::webhook::DeliveryState;

    fn schema<T: utoipa::PartialSchema>() -> Value {
        serde_json::to_value(T::schema()).unwrap()
    }

    #[test]
    fn enum_schemas_list_the_serialized_values() {
        macro_rules! check {
            ($($name:ident)+) => {$(
                let serialized = serde_json::to_value($name::ALL).unwrap();
                assert_eq!(schema::<$name>()["enum"], serialized, stringify!($name));
                let strings: Vec<_> = $name::ALL.iter().map(|value| value.as_str()).collect();
                assert_eq!(json!(strings), serialized, stringify!($name));
                assert_eq!(<$name as utoipa::ToSchema>::name(), stringify!($name));
            )+};
        }
        check! {
            AddressType AgentOperationState ArtifactState ArtifactType BlobState CheckState ClaimState Compression
            ConfigDriveType CopyState CoverageState DiskBus DiskType EventType ExpiryReason HashAlgorithm HostFeature
            ImageFormat InstanceState InterfaceState IssuerState KeyState MachineType NamespaceState NetworkState
            NodeState ObjectType OperationState OperationType OutputName PowerState RuleState SchedulingStage
            DeliveryState SideChannel Vdi
        }
    }

    #[test]
    fn enum_schemas_have_the_descriptions_of_type_and_variants() {
        let description = "The machine type of a VM.\n- `pc`: The i440FX chipset.\n\
                           - `q35`: The Q35 chipset, which secure boot requires.";
        assert_eq!(schema::<MachineType>()["description"], description);
    }
}

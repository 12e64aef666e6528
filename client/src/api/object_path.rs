//! Objects that have metadata and events.

use muster_types::object::ObjectType;

use super::error::Result;
use super::uri::path;

/// An object that has metadata and events.
#[derive(Debug, Clone, Copy)]
pub enum ObjectPath<'a> {
    /// A namespace by name.
    Namespace(&'a str),
    /// A key by namespace and name.
    Key(&'a str, &'a str),
    /// A claim by namespace and id.
    Claim(&'a str, &'a str),
    /// A trusted issuer by name.
    Issuer(&'a str),
    /// A mapping rule by namespace and name.
    Rule(&'a str, &'a str),
    /// A node by name or id.
    Node(&'a str),
    /// A network by name or id.
    Network(&'a str),
    /// An interface by id.
    Interface(&'a str),
    /// An instance by name or id.
    Instance(&'a str),
    /// An artifact by name or id.
    Artifact(&'a str),
    /// A blob by id.
    Blob(&'a str),
    /// An agent operation by id.
    AgentOperation(&'a str),
    /// A cluster operation by type and id.
    Operation(&'a str, &'a str),
}

impl ObjectPath<'_> {
    /// Returns the type of the object.
    #[must_use]
    pub fn object_type(self) -> ObjectType {
        match self {
            Self::Namespace(_) => ObjectType::Namespace,
            Self::Key(..) => ObjectType::NamespaceKey,
            Self::Claim(..) => ObjectType::NamespaceClaim,
            Self::Issuer(_) => ObjectType::Issuer,
            Self::Rule(..) => ObjectType::Rule,
            Self::Node(_) => ObjectType::Node,
            Self::Network(_) => ObjectType::Network,
            Self::Interface(_) => ObjectType::Interface,
            Self::Instance(_) => ObjectType::Instance,
            Self::Artifact(_) => ObjectType::Artifact,
            Self::Blob(_) => ObjectType::Blob,
            Self::AgentOperation(_) => ObjectType::AgentOperation,
            Self::Operation(..) => ObjectType::ClusterOperation,
        }
    }

    /// Returns the path of the object, followed by `rest`.
    pub(super) fn path(self, rest: &[&str]) -> Result<String> {
        let start = match self {
            Self::Namespace(name) => path(&["auth", "namespaces", name])?,
            Self::Key(namespace, key) => path(&["auth", "namespaces", namespace, "keys", key])?,
            Self::Claim(namespace, claim) => path(&["auth", "namespaces", namespace, "claims", claim])?,
            Self::Issuer(issuer) => path(&["auth", "issuers", issuer])?,
            Self::Rule(namespace, rule) => path(&["auth", "namespaces", namespace, "rules", rule])?,
            Self::Node(node) => path(&["nodes", node])?,
            Self::Network(network) => path(&["networks", network])?,
            Self::Interface(interface) => path(&["interfaces", interface])?,
            Self::Instance(instance) => path(&["instances", instance])?,
            Self::Artifact(artifact) => path(&["artifacts", artifact])?,
            Self::Blob(blob) => path(&["blobs", blob])?,
            Self::AgentOperation(operation) => path(&["agentoperations", operation])?,
            Self::Operation(operation_type, id) => path(&["clusteroperations", operation_type, id])?,
        };
        Ok(start + &path(rest)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_keys_that_would_traverse_the_path() {
        assert!(ObjectPath::Node("sim-1").path(&["metadata", ".."]).is_err());
    }
}

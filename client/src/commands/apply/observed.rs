//! The objects of the cluster that apply compares with those of the files.

use std::collections::BTreeSet;

use serde_json::Value;

use super::manifest::{Declared, Identity};
use super::ownership::Mark;
use super::schema::Kind;
use crate::api::{ApiResponse, Client, Error, ListQuery, ObjectPath};

/// The beginning of the sources of uploaded artifacts.
pub(super) const UPLOAD_SOURCE: &str = "sf://upload/";

/// An object of the cluster.
#[derive(Debug, Clone)]
pub(super) struct Observed {
    pub(super) identity: Identity,
    /// Its UUID, or the name of a namespace, an issuer or a rule.
    pub(super) id: String,
    pub(super) record: Value,
    pub(super) mark: Option<Mark>,
    pub(super) condition: Condition,
}

/// Whether an object can be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Condition {
    Ready,
    /// It is being created.
    Pending,
    /// It failed, for this reason.
    Failed(String),
}

impl Observed {
    /// Creates an object from a record, unless it is deleted or not one that apply manages.
    pub(super) fn new(kind: Kind, record: Value) -> Option<Self> {
        let text = |name: &str| record[name].as_str().map(str::to_owned);
        let condition = match record["state"].as_str().unwrap_or_default() {
            "deleted" | "delete-wait" => return None,
            "created" => Condition::Ready,
            "initial" | "preflight" | "creating" => Condition::Pending,
            _ => Condition::Failed(
                text("error_message").unwrap_or_else(|| "the server gives no reason".to_owned()),
            ),
        };
        let name = text("name")?;
        let namespace = if kind.has_namespace() { Some(text("namespace")?) } else { None };
        let id = match kind {
            Kind::Namespace | Kind::Issuer | Kind::Rule => name.clone(),
            Kind::Network | Kind::Artifact | Kind::Instance => text("uuid")?,
        };
        let name = if kind == Kind::Artifact {
            if !matches!(record["artifact_type"].as_str(), Some("image" | "other")) {
                return None;
            }
            let source = text("source_url")?;
            if is_upload_source(&source, &name) { name } else { source }
        } else {
            name
        };
        let mark = Mark::of(record.get("metadata"));
        Some(Self { identity: Identity { kind, namespace, name }, id, record, mark, condition })
    }

    /// Returns where its metadata is.
    pub(super) fn path(&self) -> ObjectPath<'_> {
        let id = self.id.as_str();
        match self.identity.kind {
            Kind::Namespace => ObjectPath::Namespace(id),
            Kind::Issuer => ObjectPath::Issuer(id),
            Kind::Rule => ObjectPath::Rule(self.identity.namespace.as_deref().unwrap_or_default(), id),
            Kind::Network => ObjectPath::Network(id),
            Kind::Artifact => ObjectPath::Artifact(id),
            Kind::Instance => ObjectPath::Instance(id),
        }
    }
}

/// Returns whether a source is the one that the server records for an uploaded artifact. It has the namespace of the uploader,
/// which may be another one than that of the artifact.
fn is_upload_source(source: &str, name: &str) -> bool {
    let rest = source.strip_prefix(UPLOAD_SOURCE).and_then(|rest| rest.strip_suffix(name));
    rest.and_then(|rest| rest.strip_suffix('/')).is_some_and(|namespace| !namespace.contains('/'))
}

/// The visible objects of the cluster.
#[derive(Debug, Default)]
pub(super) struct Cluster {
    pub(super) objects: Vec<Observed>,
}

impl Cluster {
    /// Lists the objects. Those of types that neither the files contain nor the caller may list are omitted. With
    /// `all_rules`, the rules of all visible namespaces are listed, otherwise only those of the namespaces in the files.
    pub(super) async fn read(
        client: &Client,
        declared: &[Declared],
        all_rules: bool,
    ) -> anyhow::Result<Self> {
        let query = ListQuery::default();
        let mut cluster = Self::default();
        let is_declared = |kind| declared.iter().any(|object| object.identity.kind == kind);
        cluster.add(Kind::Namespace, client.namespaces(&query).await, is_declared(Kind::Namespace))?;
        cluster.add(Kind::Issuer, client.issuers(&query).await, is_declared(Kind::Issuer))?;
        cluster.add(Kind::Network, client.networks(false, &query).await, is_declared(Kind::Network))?;
        cluster.add(Kind::Artifact, client.artifacts(&query).await, is_declared(Kind::Artifact))?;
        cluster.add(Kind::Instance, client.instances(false, &query).await, is_declared(Kind::Instance))?;
        let rules = declared.iter().filter(|object| object.identity.kind == Kind::Rule);
        let rules: BTreeSet<String> = rules.filter_map(|object| object.identity.namespace.clone()).collect();
        let visible = cluster.objects.iter().filter(|object| object.identity.kind == Kind::Namespace);
        let visible: BTreeSet<String> = visible.map(|object| object.id.clone()).collect();
        let searched = if all_rules { rules.union(&visible).cloned().collect() } else { rules.clone() };
        for namespace in searched.iter().filter(|namespace| visible.contains(*namespace)) {
            let is_declared = rules.contains(namespace);
            cluster.add(Kind::Rule, client.rules(namespace, &query).await, is_declared)?;
        }
        Ok(cluster)
    }

    fn add<T>(
        &mut self,
        kind: Kind,
        response: Result<ApiResponse<Vec<T>>, Error>,
        is_declared: bool,
    ) -> anyhow::Result<()> {
        let response = match response {
            Err(error) if !is_declared && matches!(error.status(), Some(401 | 403 | 404)) => return Ok(()),
            other => other?,
        };
        let records = response.json().as_array().cloned().unwrap_or_default();
        self.objects.extend(records.into_iter().filter_map(|record| Observed::new(kind, record)));
        Ok(())
    }

    /// Returns the object that a file describes, or why it is not known which one it is.
    pub(super) fn find(&self, declared: &Declared) -> Result<Option<&Observed>, String> {
        let found = self.objects.iter().filter(|object| object.identity == declared.identity);
        let found = found.filter(|object| {
            object.record["artifact_type"].as_str().is_none_or(|kind| kind == artifact_type(declared))
        });
        let (failed, usable): (Vec<&Observed>, Vec<&Observed>) =
            found.partition(|object| matches!(object.condition, Condition::Failed(_)));
        match usable.as_slice() {
            [only] => Ok(Some(only)),
            [] => Ok(failed.into_iter().max_by_key(|object| object.mark.is_some())),
            several => {
                let ids: Vec<&str> = several.iter().map(|object| object.id.as_str()).collect();
                Err(format!(
                    "{} {}s have this name: {}; delete or rename all but one",
                    ids.len(),
                    declared.identity.kind,
                    ids.join(", ")
                ))
            }
        }
    }

    /// Returns the id of a usable object by type, namespace and name.
    pub(super) fn id_of(&self, kind: Kind, namespace: &str, name: &str) -> Option<&str> {
        let named = self
            .objects
            .iter()
            .filter(|object| object.identity.kind == kind && object.record["name"] == name);
        let mut usable = named.filter(|object| {
            object.identity.namespace.as_deref() == Some(namespace)
                && !matches!(object.condition, Condition::Failed(_))
        });
        usable.next().map(|object| object.id.as_str())
    }
}

/// Returns the type of an artifact in a file.
pub(super) fn artifact_type(declared: &Declared) -> &str {
    declared.fields.get("artifact_type").and_then(Value::as_str).unwrap_or("image")
}

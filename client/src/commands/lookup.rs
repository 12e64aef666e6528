//! Objects that share a name, which the API permits: the choice between them, and a warning before another one is created.

use muster_types::artifact::ArtifactState;
use muster_types::ids::InstanceId;
use muster_types::network::NetworkState;
use muster_types::object::NameOrId;
use muster_types::time::now;

use super::instance_refusal::MAX_EVENTS;
use crate::api::{self, ApiResponse, ArtifactRef, Client, EventQuery, ListQuery, ObjectPath};
use crate::exit_code::{Outcome, error_with_outcome};
use crate::output::escape_control;
use crate::time::format_age;

/// The status of a name that several objects have.
const AMBIGUOUS: u16 = 400;
/// The maximum number of objects that a message lists.
const MAX_LISTED: usize = 10;

/// A type of objects that can be given by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NamedType {
    Instance,
    Network,
    Artifact,
}

/// An object with the name in question.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Candidate {
    id: String,
    namespace: String,
    state: String,
    /// It exists or is being created, and has not failed.
    is_active: bool,
}

impl NamedType {
    fn word(self) -> &'static str {
        match self {
            Self::Instance => "instance",
            Self::Network => "network",
            Self::Artifact => "artifact",
        }
    }

    fn path(self, id: &str) -> ObjectPath<'_> {
        match self {
            Self::Instance => ObjectPath::Instance(id),
            Self::Network => ObjectPath::Network(id),
            Self::Artifact => ObjectPath::Artifact(id),
        }
    }

    /// Resolves a name on the server. Fails with status 400 if it is ambiguous.
    async fn find(self, client: &Client, name: &str, namespace: Option<&str>) -> api::Result<()> {
        match self {
            Self::Instance => client.instance_in(name, namespace).await.map(drop),
            Self::Network => client.network_in(name, namespace).await.map(drop),
            Self::Artifact => client.artifact(ArtifactRef { artifact: name, namespace }).await.map(drop),
        }
    }

    /// Returns all visible objects with a name.
    async fn with_name(self, client: &Client, name: &str) -> api::Result<Vec<Candidate>> {
        // A prefix, because some names have a meaning as values of filters.
        let query = ListQuery { filter: vec![format!("name:{name}*")], ..ListQuery::default() };
        Ok(match self {
            Self::Instance => {
                let all = client.instances(false, &query).await?.value()?.into_iter();
                let named = all.filter(|record| record.name == name).map(|record| Candidate {
                    id: record.uuid.to_string(),
                    namespace: record.namespace,
                    state: record.state.to_string(),
                    is_active: record.state.is_active(),
                });
                named.collect()
            }
            Self::Network => {
                let all = client.networks(false, &query).await?.value()?.into_iter();
                let named = all.filter(|record| record.name == name).map(|record| Candidate {
                    id: record.uuid.to_string(),
                    namespace: record.namespace.unwrap_or_default(),
                    state: record.state.to_string(),
                    is_active: matches!(record.state, NetworkState::Initial | NetworkState::Created),
                });
                named.collect()
            }
            Self::Artifact => {
                let all = client.artifacts(&query).await?.value()?.into_iter();
                let named = all.filter(|record| record.name == name).map(|record| Candidate {
                    id: record.uuid.to_string(),
                    namespace: record.namespace,
                    state: record.state.to_string(),
                    is_active: matches!(record.state, ArtifactState::Initial | ArtifactState::Created),
                });
                named.collect()
            }
        })
    }
}

/// Replaces an ambiguous name by the id of the only object with this name that has not failed and is not being deleted.
/// Fails if there are several. Other references stay as they are.
pub(super) async fn resolve(
    client: &Client,
    kind: NamedType,
    reference: &mut String,
    namespace: Option<&str>,
) -> anyhow::Result<()> {
    let found = ambiguous(client, kind, reference, namespace).await?;
    let mut active = found.iter().filter(|candidate| candidate.is_active);
    match (active.next(), active.next()) {
        (Some(only), None) => only.id.clone_into(reference),
        _ if found.is_empty() => {}
        _ => return Err(ambiguity(client, kind, reference, &found).await),
    }
    Ok(())
}

/// Fails if the server does not know which of several objects the name means: for commands that destroy the object.
pub(super) async fn require_unambiguous(
    client: &Client,
    kind: NamedType,
    reference: &str,
    namespace: Option<&str>,
) -> anyhow::Result<()> {
    let found = ambiguous(client, kind, reference, namespace).await?;
    if found.is_empty() { Ok(()) } else { Err(ambiguity(client, kind, reference, &found).await) }
}

/// Warns that a new object will have the same name as existing ones.
pub(super) async fn warn_if_name_exists(
    client: &Client,
    kind: NamedType,
    name: &str,
    namespace: Option<&str>,
) {
    let namespace = namespace.unwrap_or(client.own_namespace());
    match kind.find(client, name, Some(namespace)).await {
        Ok(()) => {}
        Err(error) if error.status() == Some(AMBIGUOUS) => {}
        // No object has the name, or creating one fails with the same error.
        Err(_) => return,
    }
    let mut found = kind.with_name(client, name).await.unwrap_or_default();
    found.retain(|candidate| candidate.namespace == namespace);
    if found.is_empty() {
        return;
    }
    let consequence = if found.iter().any(|candidate| candidate.is_active) {
        "give the UUID instead of the name from now on"
    } else {
        "the name will refer to the new one"
    };
    crate::message!(
        "warning: namespace {} already has {} with the name {}: {}; {consequence}",
        escape_control(namespace),
        if found.len() == 1 {
            format!("this {}", kind.word())
        } else {
            format!("{} {}s", found.len(), kind.word())
        },
        escape_control(name),
        describe(client, kind, &found).await,
    );
}

/// Returns the objects that an ambiguous name refers to, or nothing if the server knows what the reference means.
async fn ambiguous(
    client: &Client,
    kind: NamedType,
    reference: &str,
    namespace: Option<&str>,
) -> anyhow::Result<Vec<Candidate>> {
    // All ids have the same format.
    if matches!(NameOrId::<InstanceId>::parse(reference), NameOrId::Id(_)) {
        return Ok(vec![]);
    }
    match kind.find(client, reference, namespace).await {
        Err(error) if error.status() == Some(AMBIGUOUS) => {}
        // The command itself reports other errors.
        Ok(()) | Err(_) => return Ok(vec![]),
    }
    let mut found = kind.with_name(client, reference).await?;
    let searched = namespace.unwrap_or(client.own_namespace());
    if namespace.is_some() || found.iter().any(|candidate| candidate.namespace == searched) {
        found.retain(|candidate| candidate.namespace == searched);
    }
    Ok(found)
}

async fn ambiguity(client: &Client, kind: NamedType, name: &str, found: &[Candidate]) -> anyhow::Error {
    let (word, name) = (kind.word(), escape_control(name));
    let listed = describe(client, kind, found).await;
    let text =
        format!("{} {word}s have the name {name}: {listed}; give a UUID instead of the name", found.len());
    // As if the server had refused the name.
    error_with_outcome(Outcome::Refused, text)
}

/// Describes objects by id, state, age and namespace.
async fn describe(client: &Client, kind: NamedType, found: &[Candidate]) -> String {
    let mut listed = vec![];
    for candidate in found.iter().take(MAX_LISTED) {
        let Candidate { id, namespace, state, .. } = candidate;
        let age = age(client, kind.path(id)).await;
        listed.push(format!("{id} ({state}, created {age}, namespace {})", escape_control(namespace)));
    }
    if found.len() > MAX_LISTED {
        listed.push(format!("and {} more", found.len() - MAX_LISTED));
    }
    listed.join(", ")
}

/// Returns the age of an object, from its oldest event: records do not contain it.
async fn age(client: &Client, object: ObjectPath<'_>) -> String {
    let query = EventQuery { limit: Some(MAX_EVENTS), ..EventQuery::default() };
    let events = client.events(object, &query).await.and_then(ApiResponse::value).unwrap_or_default();
    match events.last() {
        Some(oldest) if events.len() < MAX_EVENTS as usize => format_age(now(), oldest.timestamp),
        _ => "at an unknown time".to_owned(),
    }
}

#[cfg(test)]
mod tests;

//! Event streams: who may see which messages, and what is sent. See docs/decisions/0080.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use muster_types::event::EventRecord;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::{Error, Result};
use serde::Serialize;
use tokio::sync::Semaphore;
use utoipa::ToSchema;

use crate::app::App;
use crate::auth::Caller;
use crate::auth::access::require_namespace;
use crate::auth::scopes::{self, CLUSTER_ADMIN};
use crate::state::{EVENT_PAGE, EventSubscription, MAX_COMMIT_DELAY, StreamItem, StreamMessage};
use muster_store::event_streams::{self, EventPosition, ObjectEvent};

/// An event of an object, as a stream sends it.
#[derive(Debug, Serialize, ToSchema)]
pub struct StreamedEvent {
    #[serde(flatten)]
    pub event: EventRecord,
    /// The type of the object that the event is about.
    pub object_type: ObjectType,
    /// UUID of the object; the name of a namespace.
    pub object_uuid: String,
    /// The namespace of the object, if it has one.
    pub namespace: Option<String>,
}

/// A change of an object that has no event, such as the progress of its operation.
#[derive(Debug, Serialize, ToSchema)]
pub struct StreamedChange {
    /// The type of the object that has changed.
    pub object_type: ObjectType,
    /// UUID of the object; the name of a namespace.
    pub uuid: String,
    /// The namespace of the object, if it has one.
    pub namespace: Option<String>,
}

/// What a client selects.
#[derive(Debug, Clone, Default)]
pub struct StreamRequest {
    pub object_type: Option<String>,
    pub object_uuid: Option<String>,
    pub namespace: Option<String>,
    /// The `id` of the last message that the client has received.
    pub last_event_id: Option<String>,
}

/// What a client of a stream may see, and wants to.
#[derive(Debug, Clone)]
pub(crate) struct StreamFilter {
    /// The namespace of the caller.
    caller: String,
    is_system: bool,
    /// The scopes of the caller; `None` is everything.
    scopes: Option<Vec<String>>,
    /// Only messages about this object.
    object: Option<ObjectRef>,
    /// Only messages about objects of this namespace; `None` is every namespace.
    namespace: Option<String>,
}

/// The number of events that are read for a client that resumes. One that has missed more reads its objects again.
const MAX_REPLAYED_EVENTS: usize = 5000;

/// Messages of requests and logins. They change nothing in the namespace that they are events of.
const TOKEN_USES: [&str; 4] = [
    "token used to authenticate request",
    "token created from key",
    "token created from login ticket",
    "login ticket created",
];

impl StreamFilter {
    /// Returns what the stream sends of a message, if anything.
    fn view(&self, message: &StreamMessage) -> Option<Bytes> {
        if self.allows(message) {
            return Some(message.text.clone());
        }
        message.notice.clone().filter(|_| self.is_noticed(message))
    }

    /// Returns whether the stream tells that an object has changed whose events the caller may not see: its own namespace, and
    /// the keys of it, which the caller may read.
    fn is_noticed(&self, message: &StreamMessage) -> bool {
        let is_own = message.owner.as_ref() == Some(&self.caller)
            && self.namespace.as_ref() == Some(&self.caller)
            && self.object.is_none();
        is_own && scopes::grants(self.scopes.as_deref(), "auth.read")
    }

    /// Returns whether a message belongs to the stream. It needs the scope of reading the object, and the events of some types
    /// of objects are only for administrators, as in the lists of events.
    fn allows(&self, message: &StreamMessage) -> bool {
        let object = &message.object;
        let Some((scope, is_administrative)) = required_scope(object.object_type) else { return false };
        let grants = |scope| scopes::grants(self.scopes.as_deref(), scope);
        if !grants(scope) || is_administrative && !(self.is_system && grants(CLUSTER_ADMIN)) {
            return false;
        }
        // The events of a blob, which has no owner, belong to the namespace that caused them.
        let is_blob = object.object_type == ObjectType::Blob;
        let owner = if is_blob { message.cause.as_ref() } else { message.owner.as_ref() };
        // A trust does not open these.
        let is_private = is_blob || object.object_type == ObjectType::ClusterOperation;
        let is_visible = self.is_system || owner.is_some() && (!is_private || owner == Some(&self.caller));
        is_visible
            && self.object.as_ref().is_none_or(|wanted| wanted == object)
            && self.namespace.as_ref().is_none_or(|wanted| owner == Some(wanted))
    }
}

/// Returns the scope that reading an object of a type needs, and whether only administrators may read its events. `None` if
/// the API does not return them.
pub(crate) fn required_scope(object_type: ObjectType) -> Option<(&'static str, bool)> {
    Some(match object_type {
        ObjectType::ApiRequest => return None,
        ObjectType::Namespace | ObjectType::NamespaceKey | ObjectType::NamespaceClaim => ("auth.read", true),
        ObjectType::Node => ("node.read", true),
        ObjectType::Issuer => ("issuer.read", true),
        ObjectType::Network => ("network.read", false),
        ObjectType::Interface => ("interface.read", false),
        ObjectType::Instance => ("instance.read", false),
        ObjectType::Artifact => ("artifact.read", false),
        ObjectType::Blob => ("blob.read", false),
        ObjectType::Upload => ("upload.read", false),
        ObjectType::ClusterOperation => ("clusteroperation.read", false),
        ObjectType::AgentOperation => ("agentoperation.read", false),
        ObjectType::Rule => ("rule.read", false),
    })
}

/// An open stream.
#[derive(Debug)]
pub struct EventStream {
    subscription: EventSubscription,
    filter: StreamFilter,
    /// The events that the client has missed; `None` once they are not among the current ones.
    backlog: Option<Backlog>,
    /// Whether the client must read its objects again when the stream starts.
    needs_reset: bool,
    /// Unix time at which the token of the caller expires.
    pub expires: u64,
}

/// Opens a stream. Fails if the caller may not see the object or the namespace.
pub async fn open(app: &App, caller: &Caller, request: &StreamRequest) -> Result<EventStream> {
    let filter = filter(app, caller, request).await?;
    let token = caller.token.ok_or_else(|| Error::Internal("a caller without a token".into()))?;
    let key = (caller.namespace.clone(), caller.key_name.clone());
    let (limit, allowed) = (filter.namespace.clone(), filter.clone());
    let view = Box::new(move |message: &StreamMessage| allowed.view(message));
    let subscription = app.event_streams.open(key, caller.nonce.clone(), limit, view)?;
    let last = request.last_event_id.as_deref();
    let position = last.and_then(|last| last.parse().ok()).filter(|position: &f64| position.is_finite());
    let needs_reset = last.is_some() && position.is_none();
    let backlog =
        position.map(|position| Backlog::new(position, app.event_streams.replays(&caller.namespace)));
    if backlog.is_none() {
        subscription.start();
    }
    Ok(EventStream { subscription, filter, backlog, needs_reset, expires: token.expires })
}

async fn filter(app: &App, caller: &Caller, request: &StreamRequest) -> Result<StreamFilter> {
    let mut filter = StreamFilter {
        caller: caller.namespace.clone(),
        is_system: caller.is_system(),
        scopes: caller.scopes.clone(),
        object: None,
        namespace: (!caller.is_system()).then(|| caller.namespace.clone()),
    };
    if let Some(namespace) = &request.namespace {
        require_namespace(&*app.store, caller, namespace).await?;
        filter.namespace = Some(namespace.clone());
    }
    let object = match (&request.object_type, &request.object_uuid) {
        (None, None) => return Ok(filter),
        (Some(object_type), Some(id)) => {
            let object_type: ObjectType =
                object_type.parse().map_err(|error| Error::Invalid(format!("object_type: {error}")))?;
            ObjectRef::new(object_type, id)
        }
        _ => return Err(Error::Invalid("object_type and object_uuid must be given together".into())),
    };
    let not_found = || Error::not_found("object");
    let (scope, is_administrative) = required_scope(object.object_type).ok_or_else(not_found)?;
    for scope in [Some(scope), is_administrative.then_some(CLUSTER_ADMIN)].into_iter().flatten() {
        if !scopes::grants(caller.scopes.as_deref(), scope) {
            return Err(Error::Forbidden("token is not scoped for this operation".into()));
        }
    }
    if is_administrative && !caller.is_system() {
        return Err(Error::Unauthenticated("unauthorized".into()));
    }
    // A blob has no owner: the filter selects the events that the caller has caused.
    if !caller.is_system() && object.object_type != ObjectType::Blob {
        let owners = event_streams::owners(&*app.store, &[&object]).await?;
        let owner = owners.get(&object).ok_or_else(not_found)?;
        if !caller.may_see(&*app.store, owner).await? {
            return Err(not_found());
        }
        filter.namespace = Some(owner.clone());
    }
    filter.object = Some(object);
    Ok(filter)
}

impl EventStream {
    /// Waits for the next messages, of which there may be none. Returns `None` at the end of the stream.
    pub async fn next(&mut self, app: &App) -> Option<Vec<Bytes>> {
        if let Some(backlog) = self.backlog.as_mut().filter(|backlog| !backlog.is_complete) {
            let read = backlog.read(app, &self.filter).await;
            if backlog.is_complete && !backlog.is_last {
                // Only now, so that few current messages wait until the client has caught up.
                self.subscription.start();
            }
            // After an error, the client resumes the stream.
            let read = read
                .inspect_err(|error| tracing::warn!(%error, "failed to read events for a stream"))
                .ok()?;
            if read.is_none() {
                let (has_started, reached) = (backlog.is_last, backlog.reached());
                self.backlog = None;
                if has_started {
                    return Some(vec![RESET, started(reached)]);
                }
                self.needs_reset = true;
                self.subscription.start();
                return Some(vec![]);
            }
            return read;
        }
        match self.subscription.next().await? {
            StreamItem::Started(stored) => {
                let position = self.backlog.as_mut().map_or(stored, Backlog::read_again);
                // Only now: what changes after the client has read its objects is in the stream.
                let reset = std::mem::take(&mut self.needs_reset).then_some(RESET);
                Some(reset.into_iter().chain([started(position)]).collect())
            }
            StreamItem::Message { event, text } => {
                let is_sent = self.backlog.as_ref().is_some_and(|backlog| backlog.has_sent(event.as_deref()));
                Some(if is_sent { vec![] } else { vec![text] })
            }
            StreamItem::Position(stored) => {
                self.backlog = self.backlog.take().filter(|backlog| backlog.may_overlap(stored));
                Some(vec![format!("id: {stored}\n\n").into()])
            }
        }
    }
}

/// Reads the events since a position in two passes. The first one catches up with the current events. The second one starts
/// when the stream receives those, and reads what became visible in between.
#[derive(Debug)]
struct Backlog {
    /// The position of the client.
    resumed: f64,
    position: EventPosition,
    /// The last events that were sent, with the time at which they were stored.
    sent: HashMap<String, f64>,
    is_complete: bool,
    /// Whether this is the second pass.
    is_last: bool,
    /// The number of events that were read.
    count: usize,
    /// Limits the concurrent reads of the namespace.
    limit: Arc<Semaphore>,
}

impl Backlog {
    fn new(resumed: f64, limit: Arc<Semaphore>) -> Self {
        // Events that became visible late may be before the position. Others are sent twice.
        let position = EventPosition { stored: resumed - MAX_COMMIT_DELAY, event_uuid: String::new() };
        Self { resumed, position, sent: HashMap::new(), is_complete: false, is_last: false, count: 0, limit }
    }

    /// Returns the position so far.
    fn reached(&self) -> f64 {
        self.position.stored.max(self.resumed)
    }

    /// Starts the second pass. Returns the position so far.
    fn read_again(&mut self) -> f64 {
        let reached = self.reached();
        let stored = self.position.stored - MAX_COMMIT_DELAY;
        self.position = EventPosition { stored, event_uuid: String::new() };
        (self.is_complete, self.is_last) = (false, true);
        reached
    }

    /// Returns the next messages; `None` if the client has missed too many. If it is cancelled, the next call returns them.
    async fn read(&mut self, app: &App, filter: &StreamFilter) -> Result<Option<Vec<Bytes>>> {
        let limit = Arc::clone(&self.limit);
        // Held only while a page is read: a client that does not read its stream delays no other.
        let _permit = limit.acquire().await;
        let page = event_streams::page(&*app.store, &self.position, EVENT_PAGE).await?;
        let Some(last) = page.last().cloned() else {
            self.is_complete = true;
            return Ok(Some(vec![]));
        };
        if self.count + page.len() > MAX_REPLAYED_EVENTS {
            return Ok(None);
        }
        self.count += page.len();
        let new: Vec<EventPosition> =
            page.into_iter().filter(|event| !self.sent.contains_key(&event.event_uuid)).collect();
        let messages = read_messages(app, &new).await?;
        self.sent.extend(new.into_iter().map(|event| (event.event_uuid, event.stored)));
        // The second pass and the current events go back this far.
        let oldest = last.stored - 2.0 * MAX_COMMIT_DELAY;
        self.sent.retain(|_, stored| *stored >= oldest);
        self.position = last;
        Ok(Some(messages.iter().filter_map(|message| filter.view(message)).collect()))
    }

    fn has_sent(&self, event: Option<&str>) -> bool {
        event.is_some_and(|event| self.sent.contains_key(event))
    }

    /// Returns whether current events may be among those that were sent.
    fn may_overlap(&self, stored: f64) -> bool {
        self.position.stored > stored - 2.0 * MAX_COMMIT_DELAY
    }
}

/// An event of an object, with the namespace of the object, if it has one.
#[derive(Debug)]
pub(crate) struct OwnedEvent {
    pub(crate) position: EventPosition,
    pub(crate) event: ObjectEvent,
    pub(crate) owner: Option<String>,
}

/// Returns events with each of their objects, in their order.
pub(crate) async fn read_events(app: &App, page: &[EventPosition]) -> Result<Vec<OwnedEvent>> {
    let ids: Vec<&str> = page.iter().map(|event| event.event_uuid.as_str()).collect();
    let events = event_streams::with_objects(&*app.store, &ids).await?;
    let objects: Vec<&ObjectRef> = events.iter().map(|event| &event.object).collect();
    let owners = event_streams::owners(&*app.store, &objects).await?;
    let mut of_event: HashMap<String, Vec<ObjectEvent>> = HashMap::new();
    for event in events {
        of_event.entry(event.event.event_uuid.clone()).or_default().push(event);
    }
    let mut owned = Vec::with_capacity(page.len());
    for position in page {
        for event in of_event.remove(&position.event_uuid).unwrap_or_default() {
            let owner = match event.object.object_type {
                ObjectType::Namespace => Some(event.object.id.clone()),
                _ => owners.get(&event.object).cloned(),
            };
            owned.push(OwnedEvent { position: position.clone(), event, owner });
        }
    }
    Ok(owned)
}

/// Returns the messages of events, in their order.
pub(crate) async fn read_messages(app: &App, page: &[EventPosition]) -> Result<Vec<StreamMessage>> {
    read_events(app, page).await?.into_iter().map(event_message).collect()
}

fn event_message(event: OwnedEvent) -> Result<StreamMessage> {
    let OwnedEvent { position, event: ObjectEvent { event, object, cause }, owner } = event;
    let data = StreamedEvent {
        event,
        object_type: object.object_type,
        object_uuid: object.id.clone(),
        namespace: owner.clone(),
    };
    let text = message_text(Some(position.stored), "event", &data)?;
    let is_noticed = matches!(object.object_type, ObjectType::Namespace | ObjectType::NamespaceKey)
        && !TOKEN_USES.contains(&data.event.message.as_str());
    let notice = if is_noticed { Some(change_text(&object, owner.as_ref())?) } else { None };
    Ok(StreamMessage { event: Some(position.event_uuid), object, owner, cause, text, notice })
}

/// Returns the message of a change without an event.
pub(crate) fn change_message(object: ObjectRef, owner: Option<String>) -> Result<StreamMessage> {
    let text = change_text(&object, owner.as_ref())?;
    Ok(StreamMessage { event: None, object, owner, cause: None, text, notice: None })
}

fn change_text(object: &ObjectRef, owner: Option<&String>) -> Result<Bytes> {
    let (uuid, namespace) = (object.id.clone(), owner.cloned());
    message_text(None, "change", &StreamedChange { object_type: object.object_type, uuid, namespace })
}

/// Makes a client read its objects again, because events are missing in the stream.
const RESET: Bytes = Bytes::from_static(b"event: reset\ndata: {}\n\n");

/// Returns the first message of a stream, which has a position: a client that is disconnected before the first event resumes
/// here.
fn started(stored: f64) -> Bytes {
    format!("id: {stored}\nevent: started\ndata: {{}}\n\n").into()
}

/// Returns a message in the format of server-sent events. JSON has no line breaks.
fn message_text(id: Option<f64>, event: &str, data: &impl Serialize) -> Result<Bytes> {
    let data = serde_json::to_string(data)
        .map_err(|error| Error::Internal(format!("failed to serialize a message: {error}")))?;
    let id = id.map(|id| format!("id: {id}\n")).unwrap_or_default();
    Ok(format!("{id}event: {event}\ndata: {data}\n\n").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(caller: &str, scopes: Option<&[&str]>) -> StreamFilter {
        let scopes = scopes.map(|scopes| scopes.iter().map(ToString::to_string).collect());
        let is_system = caller == "system";
        let namespace = (!is_system).then(|| caller.to_owned());
        StreamFilter { caller: caller.into(), is_system, scopes, object: None, namespace }
    }

    fn message(object_type: ObjectType, owner: Option<&str>, cause: Option<&str>) -> StreamMessage {
        StreamMessage {
            event: None,
            object: ObjectRef::new(object_type, "id"),
            owner: owner.map(str::to_owned),
            cause: cause.map(str::to_owned),
            text: Bytes::new(),
            notice: Some(Bytes::from_static(b"notice")),
        }
    }

    #[test]
    fn callers_see_what_the_lists_of_events_show_them() {
        let instance = message(ObjectType::Instance, Some("red"), None);
        assert!(filter("red", None).allows(&instance) && filter("system", None).allows(&instance));
        assert!(!filter("blue", None).allows(&instance));
        assert!(
            !filter("red", None).allows(&message(ObjectType::Instance, None, Some("red"))),
            "without an owner"
        );
        assert!(filter("red", Some(&["instance.*"])).allows(&instance));
        assert!(!filter("red", Some(&["network.*"])).allows(&instance));
        for administrative in [ObjectType::Namespace, ObjectType::NamespaceKey, ObjectType::Node] {
            let message = message(administrative, Some("red"), Some("red"));
            assert!(!filter("red", None).allows(&message));
            assert!(filter("system", None).allows(&message));
            assert!(!filter("system", Some(&["auth.read", "node.read"])).allows(&message));
            assert!(filter("system", Some(&["*"])).allows(&message));
        }
        let blob = message(ObjectType::Blob, None, Some("red"));
        assert!(filter("red", None).allows(&blob) && filter("system", None).allows(&blob));
        assert!(!filter("blue", None).allows(&blob));
        assert!(!filter("system", None).allows(&message(ObjectType::ApiRequest, None, None)));
        let of_red = StreamFilter { namespace: Some("red".into()), ..filter("system", None) };
        assert!(
            of_red.allows(&instance) && !of_red.allows(&message(ObjectType::Instance, Some("blue"), None))
        );
        let other = ObjectRef::new(ObjectType::Instance, "other");
        assert!(!StreamFilter { object: Some(other), ..filter("red", None) }.allows(&instance));
    }

    #[test]
    fn callers_learn_of_changes_of_their_namespace() {
        let notice = Some(Bytes::from_static(b"notice"));
        for object_type in [ObjectType::Namespace, ObjectType::NamespaceKey] {
            let changed = message(object_type, Some("red"), Some("system"));
            assert_eq!(filter("red", None).view(&changed), notice);
            assert_eq!(filter("blue", None).view(&changed), None);
            assert_eq!(
                filter("red", Some(&["network.*"])).view(&changed),
                None,
                "it may not read its namespace"
            );
            assert_eq!(filter("system", None).view(&changed), Some(changed.text.clone()), "the event itself");
            let other = StreamFilter { namespace: Some("blue".into()), ..filter("red", None) };
            assert_eq!(other.view(&changed), None, "a stream about another namespace");
            let other = ObjectRef::new(ObjectType::Instance, "i");
            assert_eq!(StreamFilter { object: Some(other), ..filter("red", None) }.view(&changed), None);
        }
    }

    #[test]
    fn message_is_one_block_whatever_its_data() {
        let text = message_text(Some(1.5), "event", &"a\nb\rc").unwrap();
        assert_eq!(text, "id: 1.5\nevent: event\ndata: \"a\\nb\\rc\"\n\n");
    }
}

//! Event streams: who sees what, resuming, limits, and clients that do not read.

use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{Method, Request};
use http_body_util::BodyExt as _;
use muster_control::auth::tokens::TokenSubject;
use muster_control::objects;
use muster_control::objects::key::unix_seconds;
use muster_control::reconcile::tasks::TASKS;
use muster_test_cluster::{Cluster, caller, wait_for};
use muster_types::event::{Event, EventType};
use muster_types::object::{ObjectRef, ObjectType};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::instances::create;
use crate::networks::cluster;
use crate::scopes::scoped_token;

const TIMEOUT: Duration = Duration::from_secs(30);

/// A message of a stream.
#[derive(Debug, Clone)]
struct Message {
    id: Option<String>,
    kind: String,
    data: Value,
}

impl Message {
    fn parse(block: &str) -> Self {
        let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
        let data = serde_json::from_str(&field("data: ").unwrap()).unwrap();
        Self { id: field("id: "), kind: field("event: ").unwrap(), data }
    }

    /// Returns the kind, the type of the object and its id.
    fn subject(&self) -> (&str, &str, &str) {
        let id = self.data["object_uuid"].as_str().or(self.data["uuid"].as_str()).unwrap();
        (&self.kind, self.data["object_type"].as_str().unwrap(), id)
    }
}

/// A client of a stream.
struct Client {
    body: Body,
    buffer: String,
}

impl Client {
    async fn try_open(cluster: &Cluster, token: &str, query: &str, last: Option<&str>) -> Result<Self, u16> {
        let mut request = Request::get(format!("/events/stream{query}"));
        request = request.header("authorization", format!("Bearer {token}"));
        if let Some(last) = last {
            request = request.header("last-event-id", last);
        }
        let peer = "127.0.0.1:9".parse().unwrap();
        let response = cluster.service.call(request.body(Body::empty()).unwrap(), peer).await;
        if response.status() != 200 {
            return Err(response.status().as_u16());
        }
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        assert_eq!(response.headers()["cache-control"], "no-store");
        Ok(Self { body: response.into_body(), buffer: String::new() })
    }

    /// Opens a stream, and waits until it is complete.
    async fn open(cluster: &Cluster, token: &str, query: &str) -> Self {
        let mut client = Self::try_open(cluster, token, query, None).await.unwrap();
        assert_eq!(client.next().await.unwrap().kind, "started");
        client
    }

    /// Returns the next message, or `None` at the end of the stream.
    async fn next(&mut self) -> Option<Message> {
        loop {
            if let Some((block, rest)) = self.buffer.split_once("\n\n") {
                let (block, rest) = (block.to_owned(), rest.to_owned());
                self.buffer = rest;
                // A comment, or a position.
                if !block.contains("data: ") {
                    continue;
                }
                return Some(Message::parse(&block));
            }
            let frame = tokio::time::timeout(TIMEOUT, self.body.frame()).await.expect("a message in time")?;
            self.buffer.push_str(std::str::from_utf8(frame.unwrap().data_ref().unwrap()).unwrap());
        }
    }

    /// Returns the messages up to the first one that meets a condition.
    async fn until(&mut self, is_last: impl Fn(&Message) -> bool) -> Vec<Message> {
        let mut messages = Vec::new();
        loop {
            messages.push(self.next().await.unwrap_or_else(|| panic!("the stream ended after {messages:?}")));
            if is_last(&messages[messages.len() - 1]) {
                return messages;
            }
        }
    }

    /// Returns the messages up to the event with this text.
    async fn until_event(&mut self, message: &str) -> Vec<Message> {
        self.until(|received| received.data["message"] == message).await
    }
}

fn record(cluster: &Cluster, object: &ObjectRef, message: &str) {
    cluster.app.events.record(Event::audit(object.clone(), message));
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_see_their_namespace_and_system_sees_all() {
    let cluster = Cluster::new().await;
    for name in ["red", "blue", "trusted"] {
        cluster.create_namespace(name).await;
    }
    objects::trust::add(&cluster.app, &caller(), "red", "trusted").await.unwrap();
    let tokens = [cluster.token("red").await, cluster.token("blue").await, cluster.token("system").await];
    let network = async |token: &str, name: &str| {
        let body = json!({"name": name, "netblock": "10.0.0.0/24"});
        let response = cluster.call(token, Method::POST, "/networks", Some(body)).await;
        assert_eq!(response.status, 200, "{}", response.text);
        response.body["uuid"].as_str().unwrap().to_owned()
    };
    let (red_network, blue_network) = (network(&tokens[0], "r").await, network(&tokens[1], "b").await);
    cluster.settle_networks().await;
    let trusted = cluster.token("trusted").await;
    let scoped = scoped_token(&cluster, "red", &["instance.read"]).await;
    let mut red = Client::open(&cluster, &tokens[0], "").await;
    let mut all = Client::open(&cluster, &tokens[2], "").await;
    let mut of_red = Client::open(&cluster, &tokens[2], "?namespace=red").await;
    let mut by_trust = Client::open(&cluster, &trusted, "?namespace=red").await;
    let mut of_blue =
        Client::open(&cluster, &tokens[1], &format!("?object_type=network&object_uuid={blue_network}")).await;
    let mut unscoped = Client::open(&cluster, &scoped, "").await;
    let object = |id: &str| ObjectRef::new(ObjectType::Network, id);
    record(&cluster, &object(&blue_network), "first");
    record(&cluster, &object(&red_network), "second");
    record(&cluster, &ObjectRef::namespace("red"), "third");
    record(&cluster, &ObjectRef::new(ObjectType::ApiRequest, "r"), "never");
    record(&cluster, &object(&blue_network), "fourth");
    record(&cluster, &object(&red_network), "last");
    let texts = |messages: Vec<Message>| -> Vec<String> {
        let events = messages.into_iter().filter(|message| message.kind == "event");
        let texts = events.map(|message| message.data["message"].as_str().unwrap().to_owned());
        texts
            .filter(|text| ["first", "second", "third", "fourth", "last", "never"].contains(&text.as_str()))
            .collect()
    };
    let own = ["second", "last"];
    let received = red.until_event("last").await;
    let last = received.last().unwrap().clone();
    assert_eq!(texts(received), own);
    assert_eq!(last.subject(), ("event", "network", red_network.as_str()));
    assert_eq!((&last.data["namespace"], &last.data["type"]), (&json!("red"), &json!("audit")));
    assert!(last.data["event_uuid"].is_string() && last.id.is_some());
    assert_eq!(texts(by_trust.until_event("last").await), own);
    assert_eq!(texts(of_red.until_event("last").await), ["second", "third", "last"]);
    assert_eq!(texts(all.until_event("last").await), ["first", "second", "third", "fourth", "last"]);
    assert_eq!(texts(of_blue.until_event("fourth").await), ["first", "fourth"]);
    cluster.app.event_streams.close();
    assert!(unscoped.next().await.is_none(), "its scopes do not include networks");

    for (token, query, status) in [
        (&tokens[0], "?namespace=blue", 404),
        (&tokens[0], &*format!("?object_type=network&object_uuid={blue_network}"), 404),
        (&tokens[0], "?object_type=network&object_uuid=absent", 404),
        (&tokens[0], "?object_type=node&object_uuid=x", 401),
        (&tokens[0], "?object_type=api-requests&object_uuid=x", 404),
        (&tokens[0], "?object_type=network", 400),
        (&tokens[0], "?object_type=unknown&object_uuid=x", 400),
        (&scoped, &*format!("?object_type=network&object_uuid={red_network}"), 403),
        (&tokens[0], "", 503),
    ] {
        let opened = Client::try_open(&cluster, token, query, None).await;
        assert_eq!(opened.err(), Some(status), "{query}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_change_of_state_and_power_is_a_message() {
    let (cluster, token) = cluster(&[]).await;
    let mut client = Client::open(&cluster, &token, "").await;
    let record = create(&cluster, &token, "www", &json!({})).await;
    let id = record["uuid"].as_str().unwrap().to_owned();
    let created = client.until_event("state is now created").await;
    let has = |messages: &[Message], subject: (&str, &str)| {
        messages.iter().any(|message| (message.subject().1, message.subject().2) == subject)
    };
    assert!(has(&created, ("instance", &id)));
    client.until(|message| message.subject().1 == "clusteroperation").await;
    for (action, text) in [
        ("poweroff", "power state is now off"),
        ("poweron", "power state is now on"),
        ("pause", "power state is now paused"),
        ("unpause", "power state is now on"),
    ] {
        let path = format!("/instances/{id}/{action}");
        assert_eq!(cluster.call(&token, Method::POST, &path, None).await.status, 200, "{action}");
        client
            .until(|message| message.data["object_uuid"] == id.as_str() && message.data["message"] == text)
            .await;
    }
    let path = format!("/instances/{id}");
    assert_eq!(cluster.call(&token, Method::DELETE, &path, None).await.status, 200);
    cluster.settle().await;
    client
        .until(|message| {
            message.data["object_uuid"] == id.as_str() && message.data["message"] == "state is now deleted"
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn queued_operation_is_a_change_without_an_event() {
    let cluster = Cluster::new().await;
    cluster.create_namespace("red").await;
    let token = cluster.token("red").await;
    let mut client = Client::open(&cluster, &token, "").await;
    let body = json!({"name": "lan", "netblock": "10.0.0.0/24"});
    let network = cluster.call(&token, Method::POST, "/networks", Some(body)).await.body;
    let id = network["uuid"].as_str().unwrap();
    // The operation, or the network if none of its events was stored yet.
    let is_change = |message: &Message| message.subject().0 == "change";
    let queued = client.until(is_change).await.pop().unwrap();
    assert_eq!((queued.id, &queued.data["namespace"]), (None, &json!("red")));
    cluster.settle_networks().await;
    let messages = client.until_event("state is now created").await;
    assert_eq!(messages.last().unwrap().subject(), ("event", "network", id));
}

#[tokio::test(flavor = "multi_thread")]
async fn stream_resumes_without_loss() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let object = ObjectRef::namespace("system");
    let mut client = Client::try_open(&cluster, &token, "", None).await.unwrap();
    let started = client.next().await.unwrap();
    assert_eq!(started.kind, "started");
    for n in 0..5 {
        record(&cluster, &object, &format!("event {n}"));
    }
    let position = client.until_event("event 2").await.pop().unwrap().id.unwrap();
    drop(client);
    for n in 5..900 {
        record(&cluster, &object, &format!("event {n}"));
    }
    let numbers = |messages: &[Message]| -> Vec<u32> {
        let texts = messages.iter().filter_map(|message| message.data["message"].as_str());
        let mut numbers: Vec<u32> =
            texts.filter_map(|text| text.strip_prefix("event ")?.parse().ok()).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    };
    // While some of them are not stored yet, and more are recorded.
    let mut client = Client::try_open(&cluster, &token, "", Some(&position)).await.unwrap();
    let first = client.until_event("event 600").await;
    record(&cluster, &object, "end");
    let rest = client.until_event("end").await;
    let received = numbers(&[first, rest].concat());
    assert!((3..900).all(|n| received.binary_search(&n).is_ok()), "{received:?}");

    let query = format!("?last_event_id={}", started.id.unwrap());
    let mut client = Client::try_open(&cluster, &token, &query, None).await.unwrap();
    assert_eq!(numbers(&client.until_event("end").await), (0..900).collect::<Vec<_>>());
    let mut client = Client::try_open(&cluster, &token, "", Some("unknown")).await.unwrap();
    assert_eq!(client.next().await.unwrap().kind, "reset");
    assert!(client.buffer.contains("event: started"), "sent together, when the stream is complete");
    assert_eq!(client.next().await.unwrap().kind, "started");
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_has_missed_many_events_reads_its_objects_again() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let mut client = Client::try_open(&cluster, &token, "", None).await.unwrap();
    let position = client.next().await.unwrap().id.unwrap();
    drop(client);
    let missed: Vec<Event> =
        (0..5100).map(|_| Event::new(EventType::Status, ObjectRef::namespace("system"), "missed")).collect();
    for part in missed.chunks(500) {
        muster_store::events::insert(&cluster.app.store, part).await.unwrap();
    }
    let mut client = Client::try_open(&cluster, &token, "", Some(&position)).await.unwrap();
    let messages = client.until(|message| message.kind == "reset").await;
    let kinds: Vec<&str> = messages.iter().map(|message| message.kind.as_str()).collect();
    assert!(client.buffer.contains("event: started"), "sent together, when the stream is complete");
    assert_eq!(client.next().await.unwrap().kind, "started");
    assert!(kinds.len() < 5101, "{}", kinds.len());
    record(&cluster, &ObjectRef::namespace("system"), "after");
    let messages = client.until_event("after").await;
    assert!(messages.iter().all(|message| message.data["message"] != "missed"), "{messages:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_learn_that_their_namespace_has_changed() {
    let cluster = Cluster::new().await;
    for name in ["red", "blue"] {
        cluster.create_namespace(name).await;
    }
    let (red, blue) = (cluster.token("red").await, cluster.token("blue").await);
    let system = cluster.token("system").await;
    let mut client = Client::open(&cluster, &red, "").await;
    let mut other = Client::open(&cluster, &blue, "").await;
    let quota = Some(json!({"limit": 4}));
    let set = cluster.call(&system, Method::PUT, "/auth/namespaces/red/quotas/cpus", quota).await;
    assert_eq!(set.status, 200, "{}", set.text);
    let is_namespace = |message: &Message| message.data["object_type"] == "namespace";
    let notice = client.until(is_namespace).await.pop().unwrap();
    assert_eq!(notice.subject(), ("change", "namespace", "red"));
    assert!(notice.data.get("message").is_none() && notice.id.is_none(), "{notice:?}");
    cluster.app.event_streams.close();
    while let Some(message) = other.next().await {
        assert!(!is_namespace(&message), "{message:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_other_daemons_arrive_within_a_second() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let mut clients = Vec::new();
    for _ in 0..10 {
        clients.push(Client::open(&cluster, &token, "").await);
    }
    // Recorded a while ago, by a daemon that could not reach the database until now.
    let mut event = Event::new(EventType::Status, ObjectRef::namespace("system"), "from elsewhere");
    event.timestamp -= 3600.0;
    event.node = "other".into();
    let started = Instant::now();
    muster_store::events::insert(&cluster.app.store, &[event]).await.unwrap();
    for client in &mut clients {
        let received = client.until_event("from elsewhere").await.pop().unwrap();
        assert_eq!(received.data["node"], "other");
    }
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_does_not_read_is_disconnected() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let mut slow = Client::open(&cluster, &token, "").await;
    let mut fast = Client::open(&cluster, &token, "").await;
    let object = ObjectRef::namespace("system");
    for round in 0..4 {
        for n in 0..500 {
            record(&cluster, &object, &format!("event {round} {n}"));
        }
        fast.until_event(&format!("event {round} 499")).await;
    }
    wait_for("the slow client to be disconnected", async || {
        (cluster.app.event_streams.count() == 1).then_some(())
    })
    .await;
    let mut received = 0;
    while slow.next().await.is_some() {
        received += 1;
    }
    assert!(received < 2000, "{received}");
    record(&cluster, &object, "after");
    fast.until_event("after").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_a_key_are_limited() {
    let cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    let mut clients = Vec::new();
    for _ in 0..20 {
        clients.push(Client::open(&cluster, &token, "").await);
    }
    assert_eq!(Client::try_open(&cluster, &token, "", None).await.err(), Some(429));
    let other = scoped_token(&cluster, "system", &["*"]).await;
    Client::open(&cluster, &other, "").await;
    clients.pop();
    clients.push(Client::open(&cluster, &token, "").await);
    drop(clients);
    assert_eq!(cluster.app.event_streams.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn stream_ends_with_its_token_key_and_trust() {
    let cluster = Cluster::new().await;
    for name in ["red", "blue"] {
        cluster.create_namespace(name).await;
    }
    objects::trust::add(&cluster.app, &caller(), "red", "blue").await.unwrap();
    let (red, blue) = (cluster.token("red").await, cluster.token("blue").await);
    let nonce = "SELECT nonce FROM namespace_keys WHERE namespace = 'red' AND name = 'test'";
    let nonce: String = cluster.app.store.query(nonce, &[]).await.unwrap()[0].scalar().unwrap();
    let subject = TokenSubject { namespace: "red", key: "test", nonce: &nonce, scopes: None };
    let short = cluster.app.tokens.create_session(unix_seconds(), unix_seconds() + 2, subject);
    let mut expiring = Client::open(&cluster, &short, "").await;
    let mut of_key = Client::open(&cluster, &red, "").await;
    let mut of_trust = Client::open(&cluster, &blue, "?namespace=red").await;
    let mut own = Client::open(&cluster, &blue, "").await;
    while expiring.next().await.is_some() {}
    assert_eq!(cluster.app.event_streams.count(), 3);
    objects::key::delete(&cluster.app, &caller(), "red", "test").await.unwrap();
    objects::trust::remove(&cluster.app, &caller(), "red", "blue").await.unwrap();
    while of_key.next().await.is_some() {}
    while of_trust.next().await.is_some() {}
    assert_eq!(cluster.app.event_streams.count(), 1);
    cluster.app.health.drain();
    while own.next().await.is_some() {}
    assert_eq!(Client::try_open(&cluster, &blue, "", None).await.err(), Some(503));
}

#[tokio::test(flavor = "multi_thread")]
async fn sends_no_statement_without_a_client() {
    let mut cluster = Cluster::new().await;
    let token = cluster.token("system").await;
    cluster.messages(&ObjectRef::namespace("system")).await;
    cluster.kill().await;
    let stop = watch::Sender::new(false);
    let task = TASKS.iter().find(|task| task.name == "event streams").unwrap();
    let task = tokio::spawn(task.start(cluster.app.clone(), stop.subscribe()));
    drop(Client::open(&cluster, &token, "").await);
    wait_for("the statements to end", async || {
        let before = cluster.app.store.statement_count();
        tokio::time::sleep(Duration::from_millis(1200)).await;
        (cluster.app.store.statement_count() == before).then_some(())
    })
    .await;
    stop.send_replace(true);
    task.await.unwrap();
}

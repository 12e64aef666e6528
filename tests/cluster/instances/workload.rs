//! Clients that continuously create and delete instances while their daemon is killed and restarted.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muster_test_cluster::Host;
use reqwest::Method;
use serde_json::{Value, json};

use crate::TIMEOUT;
use crate::images::Random;

/// The maximum number of instances of a client.
const MAX_INSTANCES: usize = 3;

/// How long a client waits for the creation of an instance.
const CREATION_WAIT: Duration = Duration::from_secs(3);

/// The last acknowledged change of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Acknowledged {
    Accepted,
    Deleted,
}

/// The state that all clients share.
#[derive(Debug)]
pub(crate) struct Workload {
    url: String,
    token: String,
    acknowledged: Mutex<BTreeMap<String, Acknowledged>>,
    stopped: AtomicBool,
    pub(crate) random: Random,
}

impl Workload {
    pub(crate) fn new(host: &Host) -> Arc<Self> {
        Arc::new(Self {
            url: host.url(),
            token: host.token(),
            acknowledged: Mutex::default(),
            stopped: AtomicBool::new(false),
            random: Random::new(),
        })
    }

    /// Starts the clients in the network namespace of the host.
    pub(crate) fn start(self: &Arc<Self>, host: &Host, clients: usize) -> Vec<JoinHandle<()>> {
        (1..=clients)
            .map(|number| {
                let workload = Arc::clone(self);
                // Threads inherit the namespace of the thread that starts them.
                host.namespace.run(move || std::thread::spawn(move || Client::new(workload, number).run()))
            })
            .collect()
    }

    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    pub(crate) fn acknowledged(&self) -> MutexGuard<'_, BTreeMap<String, Acknowledged>> {
        self.acknowledged.lock().unwrap()
    }

    /// Returns the number of accepted instances, and how many of them were deleted.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let acknowledged = self.acknowledged();
        (acknowledged.len(), acknowledged.values().filter(|change| **change == Acknowledged::Deleted).count())
    }
}

struct Client {
    workload: Arc<Workload>,
    number: usize,
    runtime: tokio::runtime::Runtime,
    http: reqwest::Client,
}

impl Client {
    fn new(workload: Arc<Workload>, number: usize) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let http = reqwest::Client::builder()
            .pool_max_idle_per_host(0)
            .timeout(Duration::from_secs(30))
            .build()
            .unwrap();
        Self { workload, number, runtime, http }
    }

    /// Returns status and body, or `None` without a response.
    fn try_call(&self, method: Method, path: &str, body: Option<&Value>) -> Option<(u16, Value)> {
        let url = format!("{}{path}", self.workload.url);
        let mut request = self.http.request(method, url).bearer_auth(&self.workload.token);
        if let Some(body) = body {
            request = request.json(body);
        }
        self.runtime.block_on(async {
            let response = request.send().await.ok()?;
            let status = response.status().as_u16();
            Some((status, response.json().await.ok()?))
        })
    }

    /// Repeats a call until there is a response.
    fn call_with_retry(&self, method: &Method, path: &str) -> (u16, Value) {
        let started = Instant::now();
        loop {
            if let Some(response) = self.try_call(method.clone(), path, None) {
                return response;
            }
            assert!(started.elapsed() < TIMEOUT, "no response to {method} {path}");
            muster_testing::wait(Duration::from_millis(20));
        }
    }

    /// Returns a random request: with or without an image, with up to two interfaces.
    fn random_request(&self, number: usize) -> Value {
        let random = &self.workload.random;
        let disk = match random.below(3) {
            0 => json!([{ "size": 1 }]),
            1 => json!([{ "base": "label:empty" }]),
            _ => json!([{ "base": "label:empty", "size": 1 }, { "size": 1, "bus": "scsi" }]),
        };
        let network = match random.below(3) {
            0 => json!([]),
            1 => json!([{ "network_uuid": "one", "float": random.below(2) == 0 }]),
            _ => json!([{ "network_uuid": "one" }, { "network_uuid": "two" }]),
        };
        let name = format!("storm-{}-{number}", self.number);
        json!({ "name": name, "cpus": 1, "memory": 64, "disk": disk, "network": network,
            "metadata": { "caller": self.number } })
    }

    fn run(&self) {
        let random = &self.workload.random;
        let mut instances = Vec::new();
        let mut number = 0;
        while !self.workload.stopped.load(Ordering::Relaxed) {
            number += 1;
            let response = self.try_call(Method::POST, "/instances", Some(&self.random_request(number)));
            // Without a response the instance may or may not exist, but must be consistent.
            if let Some((status, record)) = response {
                assert!(status == 200 || status == 507, "{status} {record}");
                if status == 200 {
                    let id = record["uuid"].as_str().unwrap().to_owned();
                    self.workload.acknowledged().insert(id.clone(), Acknowledged::Accepted);
                    instances.push(id);
                }
            }
            if random.below(2) == 0
                && let Some(id) = instances.last()
            {
                self.wait_until_created(id);
                self.change_randomly(id);
            }
            while instances.len() > MAX_INSTANCES || (!instances.is_empty() && random.below(3) == 0) {
                let id =
                    instances.swap_remove(usize::try_from(random.below(instances.len() as u64)).unwrap());
                self.delete(&id);
            }
        }
    }

    /// Waits for the creation of an instance, but not until the end: the state is checked later.
    fn wait_until_created(&self, id: &str) {
        let started = Instant::now();
        while started.elapsed() < CREATION_WAIT {
            let (status, record) = self.call_with_retry(&Method::GET, &format!("/instances/{id}"));
            assert_eq!(status, 200, "{record}");
            if record["state"] == "created" || record["state"] == "error" {
                return;
            }
            muster_testing::wait(Duration::from_millis(20));
        }
    }

    /// Requests a random change, which may be rejected.
    fn change_randomly(&self, id: &str) {
        let path = format!("/instances/{id}");
        let response = match self.workload.random.below(5) {
            0 => self.try_call(Method::POST, &format!("{path}/poweroff"), None),
            1 => self.try_call(Method::POST, &format!("{path}/reboothard"), None),
            2 => {
                let body = json!({ "network": { "network_uuid": "two" } });
                self.try_call(Method::POST, &format!("{path}/interfaces"), Some(&body))
            }
            3 => self.try_call(Method::POST, &format!("{path}/snapshot"), None),
            _ => None,
        };
        if let Some((status, body)) = response {
            assert!([200, 406, 409].contains(&status), "{status} {body}");
        }
    }

    fn delete(&self, id: &str) {
        let (status, body) = self.call_with_retry(&Method::DELETE, &format!("/instances/{id}"));
        assert!(status == 200 || status == 404, "{status} {body}");
        self.workload.acknowledged().insert(id.to_owned(), Acknowledged::Deleted);
    }
}

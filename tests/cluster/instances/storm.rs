//! Callers who make and delete instances all the time, while the daemon that they talk to comes and goes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muster_test_cluster::Host;
use reqwest::Method;
use serde_json::{Value, json};

use crate::PATIENCE;
use crate::images::Dice;

/// Instances that a caller has at most.
const MOST: usize = 3;

/// How long a caller waits for an instance before it goes on.
const WHILE: Duration = Duration::from_secs(3);

/// What callers were told, by instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told {
    Accepted,
    Deleted,
}

/// What all callers share.
#[derive(Debug)]
pub(crate) struct Storm {
    url: String,
    token: String,
    told: Mutex<BTreeMap<String, Told>>,
    over: AtomicBool,
    pub(crate) dice: Dice,
}

impl Storm {
    pub(crate) fn new(machine: &Host) -> Arc<Self> {
        Arc::new(Self {
            url: machine.url(),
            token: machine.token(),
            told: Mutex::default(),
            over: AtomicBool::new(false),
            dice: Dice::new(),
        })
    }

    /// Lets callers loose on the machine.
    pub(crate) fn begin(self: &Arc<Self>, machine: &Host, callers: usize) -> Vec<JoinHandle<()>> {
        (1..=callers)
            .map(|number| {
                let storm = Arc::clone(self);
                // A thread that is begun there is there.
                machine.namespace.run(move || std::thread::spawn(move || Caller::new(storm, number).act()))
            })
            .collect()
    }

    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    pub(crate) fn told(&self) -> MutexGuard<'_, BTreeMap<String, Told>> {
        self.told.lock().unwrap()
    }

    /// How many were accepted, and how many of them were deleted.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let told = self.told();
        (told.len(), told.values().filter(|told| **told == Told::Deleted).count())
    }
}

struct Caller {
    storm: Arc<Storm>,
    number: usize,
    runtime: tokio::runtime::Runtime,
    client: reqwest::Client,
}

impl Caller {
    fn new(storm: Arc<Storm>, number: usize) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let client = reqwest::Client::builder()
            .pool_max_idle_per_host(0)
            .timeout(Duration::from_secs(30))
            .build()
            .unwrap();
        Self { storm, number, runtime, client }
    }

    /// Status and JSON; nothing when there is no answer.
    fn try_call(&self, method: Method, path: &str, body: Option<&Value>) -> Option<(u16, Value)> {
        let url = format!("{}{path}", self.storm.url);
        let mut request = self.client.request(method, url).bearer_auth(&self.storm.token);
        if let Some(body) = body {
            request = request.json(body);
        }
        self.runtime.block_on(async {
            let answer = request.send().await.ok()?;
            let status = answer.status().as_u16();
            Some((status, answer.json().await.ok()?))
        })
    }

    /// Asks until there is an answer.
    fn persist(&self, method: &Method, path: &str) -> (u16, Value) {
        let started = Instant::now();
        loop {
            if let Some(answer) = self.try_call(method.clone(), path, None) {
                return answer;
            }
            assert!(started.elapsed() < PATIENCE, "no answer to {method} {path}");
            muster_testing::wait(Duration::from_millis(20));
        }
    }

    /// Any of the few kinds of instances: with and without an image, with up to two interfaces.
    fn request(&self, number: usize) -> Value {
        let dice = &self.storm.dice;
        let disk = match dice.below(3) {
            0 => json!([{ "size": 1 }]),
            1 => json!([{ "base": "label:empty" }]),
            _ => json!([{ "base": "label:empty", "size": 1 }, { "size": 1, "bus": "scsi" }]),
        };
        let network = match dice.below(3) {
            0 => json!([]),
            1 => json!([{ "network_uuid": "one", "float": dice.below(2) == 0 }]),
            _ => json!([{ "network_uuid": "one" }, { "network_uuid": "two" }]),
        };
        let name = format!("storm-{}-{number}", self.number);
        json!({ "name": name, "cpus": 1, "memory": 64, "disk": disk, "network": network,
            "metadata": { "caller": self.number } })
    }

    fn act(&self) {
        let dice = &self.storm.dice;
        let mut own = Vec::new();
        let mut number = 0;
        while !self.storm.over.load(Ordering::Relaxed) {
            number += 1;
            let answer = self.try_call(Method::POST, "/instances", Some(&self.request(number)));
            // No answer means no promise: it may be there or not, but must not be half there.
            if let Some((status, record)) = answer {
                assert!(status == 200 || status == 507, "{status} {record}");
                if status == 200 {
                    let id = record["uuid"].as_str().unwrap().to_owned();
                    self.storm.told().insert(id.clone(), Told::Accepted);
                    own.push(id);
                }
            }
            if dice.below(2) == 0
                && let Some(id) = own.last()
            {
                self.wait_until_made(id);
                self.disturb(id);
            }
            while own.len() > MOST || (!own.is_empty() && dice.below(3) == 0) {
                let id = own.swap_remove(usize::try_from(dice.below(own.len() as u64)).unwrap());
                self.delete(&id);
            }
        }
    }

    /// Waits a while until it is made. Whether it ever is, is seen in the end.
    fn wait_until_made(&self, id: &str) {
        let started = Instant::now();
        while started.elapsed() < WHILE {
            let (status, record) = self.persist(&Method::GET, &format!("/instances/{id}"));
            assert_eq!(status, 200, "{record}");
            if record["state"] == "created" || record["state"] == "error" {
                return;
            }
            muster_testing::wait(Duration::from_millis(20));
        }
    }

    /// Does one thing to it, whether it likes that or not.
    fn disturb(&self, id: &str) {
        let path = format!("/instances/{id}");
        let answer = match self.storm.dice.below(5) {
            0 => self.try_call(Method::POST, &format!("{path}/poweroff"), None),
            1 => self.try_call(Method::POST, &format!("{path}/reboothard"), None),
            2 => {
                let body = json!({ "network": { "network_uuid": "two" } });
                self.try_call(Method::POST, &format!("{path}/interfaces"), Some(&body))
            }
            3 => self.try_call(Method::POST, &format!("{path}/snapshot"), None),
            _ => None,
        };
        if let Some((status, body)) = answer {
            assert!([200, 406, 409].contains(&status), "{status} {body}");
        }
    }

    fn delete(&self, id: &str) {
        let (status, body) = self.persist(&Method::DELETE, &format!("/instances/{id}"));
        assert!(status == 200 || status == 404, "{status} {body}");
        self.storm.told().insert(id.to_owned(), Told::Deleted);
    }
}

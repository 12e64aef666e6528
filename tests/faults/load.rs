//! Callers that create, change and delete objects through random hosts, and remember what they were told.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use fastrand::Rng;
use reqwest::Method;
use serde_json::{Value, json};

use crate::client::{Api, Client};

/// The objects that one caller may have at a time.
const OBJECTS: usize = 6;

/// A network, as far as the responses to its caller describe it.
#[derive(Debug, Clone, Default)]
pub(crate) struct ExpectedNetwork {
    /// `None` if the creation got no response.
    pub(crate) id: Option<String>,
    /// The acknowledged value of its metadata.
    pub(crate) value: Option<u64>,
    /// Later values, whose calls got no response.
    pub(crate) possible_values: Vec<u64>,
    /// Set when the deletion was acknowledged; `Some(false)` if it got no response.
    pub(crate) deleted: Option<bool>,
    /// The rejection, if the creation was rejected.
    pub(crate) rejected: Option<String>,
}

/// The networks that the callers created, by name.
pub(crate) type ExpectedNetworks = Arc<Mutex<BTreeMap<String, ExpectedNetwork>>>;

/// Callers on their own threads.
#[derive(Debug)]
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    pub(crate) expected: ExpectedNetworks,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    pub(crate) fn start(client: &Client, callers: usize, seed: u64) -> Self {
        let (stop, expected) = (Arc::new(AtomicBool::new(false)), ExpectedNetworks::default());
        let threads = (0..callers)
            .map(|number| {
                let (stop, expected) = (Arc::clone(&stop), Arc::clone(&expected));
                client.spawn(move |api| {
                    let mut caller = Caller::new(api, number, seed, expected);
                    while !stop.load(Ordering::Relaxed) {
                        caller.act();
                    }
                })
            })
            .collect();
        Self { stop, expected, threads }
    }

    /// Waits for the calls in progress.
    pub(crate) fn finish(self) -> BTreeMap<String, ExpectedNetwork> {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().unwrap();
        }
        std::mem::take(&mut *self.expected.lock().unwrap())
    }
}

struct Caller {
    api: Api,
    number: usize,
    random: Rng,
    expected: ExpectedNetworks,
    /// The names of this caller's objects that exist.
    own: Vec<String>,
    counter: u64,
}

impl Caller {
    fn new(api: Api, number: usize, seed: u64, expected: ExpectedNetworks) -> Self {
        let random = Rng::with_seed(seed.wrapping_add(number as u64));
        Self { api, number, random, expected, own: Vec::new(), counter: 0 }
    }

    fn act(&mut self) {
        self.counter += 1;
        match self.random.u8(..) % 4 {
            0 if self.own.len() < OBJECTS => self.create(),
            1 if self.own.len() >= OBJECTS / 2 => self.delete(),
            _ if !self.own.is_empty() => self.write(),
            _ => self.create(),
        }
    }

    fn call(&mut self, method: Method, path: &str, body: Option<&Value>) -> Result<(u16, Value), String> {
        let host = self.random.usize(..self.api.hosts());
        let response = self.api.call(host, method, path, body);
        if response.is_err() {
            // A host that is off rejects at once.
            muster_testing::wait(std::time::Duration::from_millis(100));
        }
        response
    }

    fn change(&self, name: &str, change: impl FnOnce(&mut ExpectedNetwork)) {
        change(self.expected.lock().unwrap().entry(name.to_owned()).or_default());
    }

    fn create(&mut self) {
        let name = format!("net-{}-{}", self.number, self.counter);
        let netblock = format!("10.{}.{}.0/24", 100 + self.number, self.counter % 250);
        let body = json!({ "name": name, "netblock": netblock, "provide_dhcp": false, "provide_nat": false });
        match self.call(Method::POST, "/networks", Some(&body)) {
            Ok((200, record)) => {
                let id = record["uuid"].as_str().unwrap().to_owned();
                self.change(&name, |network| network.id = Some(id));
                self.own.push(name);
            }
            Ok((status, response)) => {
                self.change(&name, |network| network.rejected = Some(format!("{status} {response}")));
            }
            Err(_) => self.change(&name, |_| ()),
        }
    }

    fn random_own(&mut self) -> (String, String) {
        let name = self.own[self.random.usize(..self.own.len())].clone();
        let id = self.expected.lock().unwrap()[&name].id.clone().unwrap();
        (name, id)
    }

    fn write(&mut self) {
        let (name, id) = self.random_own();
        let value = self.counter;
        let path = format!("/networks/{id}/metadata/value");
        let response = self.call(Method::PUT, &path, Some(&json!({ "value": value })));
        self.change(&name, |network| match response {
            Ok((200, _)) => (network.value, network.possible_values) = (Some(value), vec![]),
            Ok(_) => {}
            Err(_) => network.possible_values.push(value),
        });
    }

    fn delete(&mut self) {
        let (name, id) = self.random_own();
        let response = self.call(Method::DELETE, &format!("/networks/{id}"), None);
        let deleted = match response {
            Ok((200 | 202, _)) => true,
            Ok(_) => return,
            Err(_) => false,
        };
        self.change(&name, |network| network.deleted = Some(deleted));
        self.own.retain(|own| *own != name);
    }
}

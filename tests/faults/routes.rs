//! Every call of the API through every host, about objects that live on another one.
//!
//! The calls are the operations of the OpenAPI document that the first host serves.

mod objects;
mod plan;
mod session;

use std::cell::Cell;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use muster_test_cluster::enter_vm_namespaces;
use muster_testing::Issuer;
use muster_testing::web_server::{Reply, WebServer};
use reqwest::Method;
use serde_json::json;

use self::objects::{Objects, instance_request, text};
use self::plan::{ApiOperation, Servers, create_issuer};
use self::session::{Problem, Session};
use crate::cluster::{CLIENT_ADDRESS, FaultCluster};

/// The hosts through which calls are made.
const HOSTS: usize = 3;

/// The result of a call.
#[derive(Debug)]
struct Outcome {
    /// `None` if there was no response.
    status: Option<u16>,
    problem: Option<Problem>,
    /// With the time for its prerequisites.
    time: Duration,
}

/// The results of all calls.
#[derive(Debug)]
struct Table {
    operations: Vec<ApiOperation>,
    /// For each host.
    columns: Vec<Vec<Outcome>>,
    /// What was not deleted at the end.
    remaining: Option<Problem>,
}

#[test]
fn every_call_works_through_every_host() {
    if !enter_vm_namespaces("routes::every_call_works_through_every_host") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let authority = directory.path().join("authority.pem");
    let agent = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let settings = [
        ("BLOB_REPLICATION_FACTOR", "1"),
        ("KERBSIDE_URL", "https://consoles.example"),
        // The content of the file does not matter.
        ("AGENT_PROGRAM", agent),
        ("IMAGE_FETCH_ALLOWED_NETWORKS", "10.99.0.0/24"),
        ("FEDERATION_JWKS_ALLOWED_NETWORKS", "10.99.0.0/24"),
        ("FEDERATION_JWKS_CA_BUNDLE", authority.to_str().unwrap()),
    ];
    // For each host through which calls are made, another one dies.
    let Some(mut cluster) = FaultCluster::start(2 * HOSTS, crate::IMAGE, false, &settings) else { return };
    let names: Vec<String> = cluster.hosts.iter().map(|host| host.name.clone()).collect();
    let addresses: Vec<String> = cluster.hosts.iter().map(|host| host.address.clone()).collect();
    let (all_names, all_addresses) = (names.clone(), addresses.clone());
    let prepare = cluster.client.spawn(move |_| {
        block_on(async {
            create_instances_of_dying_hosts(&Session::start(all_names, all_addresses).await).await
        })
    });
    prepare.join().unwrap().unwrap();
    for host in HOSTS..2 * HOSTS {
        cluster.hosts[host].power_off();
    }
    let began = Instant::now();
    let calls = cluster.client.spawn(move |_| block_on(call_all(names, addresses, authority)));
    let table = calls.join().unwrap();
    println!("{} operations through {HOSTS} hosts in {:.1?}", table.operations.len(), began.elapsed());
    let problems = table.problems();
    // First, because long output is often cut.
    problems.iter().for_each(|problem| println!("{problem}"));
    table.print();
    assert!(problems.is_empty(), "{}\n{}", problems.join("\n"), cluster.logs());
    for host in &mut cluster.hosts[..HOSTS] {
        host.stop_daemon();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

impl Table {
    /// Returns what was wrong.
    fn problems(&self) -> Vec<Problem> {
        let mut problems: Vec<Problem> = self.remaining.iter().cloned().collect();
        for (row, operation) in self.operations.iter().enumerate() {
            for (number, column) in self.columns.iter().enumerate() {
                let problem = column[row].problem.as_ref();
                problems
                    .extend(problem.map(|problem| format!("{operation} through m{}: {problem}", number + 1)));
            }
        }
        problems
    }

    /// Prints the status of each operation through each host and the longest time.
    fn print(&self) {
        for (row, operation) in self.operations.iter().enumerate() {
            let outcomes: Vec<&Outcome> = self.columns.iter().map(|column| &column[row]).collect();
            let cell = |outcome: &&Outcome| {
                let status = outcome.status.map_or("---".to_owned(), |status| status.to_string());
                status + if outcome.problem.is_some() { "!" } else { " " }
            };
            let cells: Vec<String> = outcomes.iter().map(cell).collect();
            let time = outcomes.iter().map(|outcome| outcome.time).max().unwrap_or_default();
            println!("{} {:>6.2} s | {operation}", cells.join(" "), time.as_secs_f64());
        }
    }
}

/// Creates an instance on each host that will be off.
async fn create_instances_of_dying_hosts(session: &Session) -> Result<(), Problem> {
    for node in &session.names[HOSTS..] {
        let request = instance_request(&format!("on-{node}"), node, &json!({ "disposable": true }));
        let id = text(&session.post(0, "/instances", request).await?, "uuid")?;
        session.wait_for(0, &format!("/instances/{id}"), "state", "created").await?;
    }
    Ok(())
}

/// Calls every operation through each host.
async fn call_all(names: Vec<String>, addresses: Vec<String>, authority: PathBuf) -> Table {
    let session = Session::start(names, addresses).await;
    let operations = ApiOperation::list(&session.openapi);
    let issuer = Issuer::start_at(CLIENT_ADDRESS);
    issuer.write_ca(&authority);
    create_issuer(&session, &issuer).await.unwrap();
    let images =
        WebServer::at(CLIENT_ADDRESS, |request, _| Reply::ok(request.path.repeat(100).as_bytes())).await;
    let servers = Servers { issuer, images };
    let network = json!({ "name": "lan", "netblock": "10.0.0.0/16", "provide_dns": true });
    let network = text(&session.post(0, "/networks", network).await.unwrap(), "uuid").unwrap();
    session.wait_for(0, &format!("/networks/{network}"), "state", "created").await.unwrap();
    let objects = (0..HOSTS).map(|via| Objects::create(&session, via, &network));
    let objects: Result<Vec<Objects<'_>>, Problem> = join_all(objects).await.into_iter().collect();
    let objects = objects.unwrap();
    let (operations_ref, servers) = (&operations, &servers);
    let columns = join_all(objects.iter().map(|objects| async move {
        let mut column = Vec::new();
        for operation in operations_ref {
            let started = Instant::now();
            let (status, problem) = call(objects, operation, servers).await;
            column.push(Outcome { status, problem, time: started.elapsed() });
        }
        column
    }))
    .await;
    let remaining = delete_objects(&session).await.err();
    Table { operations, columns, remaining }
}

/// Calls an operation. Returns its status and what was wrong.
async fn call(
    objects: &Objects<'_>,
    operation: &ApiOperation,
    servers: &Servers,
) -> (Option<u16>, Option<Problem>) {
    let call = match objects.prepare(operation, servers).await {
        Ok(call) => call,
        Err(problem) => return (None, Some(format!("failed to prepare: {problem}"))),
    };
    let answer = match objects.session.send(objects.via, &call).await {
        Ok(answer) => answer,
        Err(problem) => return (None, Some(problem)),
    };
    let status = Some(answer.status);
    if !operation.accepts(answer.status) {
        return (status, Some(format!("{}: {} {}", call.path, answer.status, answer.json())));
    }
    if !answer.undocumented.is_empty() {
        return (status, Some(answer.undocumented.join(", ")));
    }
    (status, objects.finish(operation, &call, answer).await.err())
}

impl<'a> Objects<'a> {
    /// Creates the guest and the blank instance on the next host, for calls through `via`.
    async fn create(session: &'a Session, via: usize, network: &str) -> Result<Self, Problem> {
        let home = (via + 1) % HOSTS;
        let (node, dead_node) = (&session.names[home], session.names[HOSTS + via].clone());
        let changes = json!({ "disk": [{ "base": "label:tiny" }], "network": [{ "network_uuid": network }] });
        let guest = instance_request(&format!("guest-{node}"), node, &changes);
        let guest = text(&session.post(home, "/instances", guest).await?, "uuid")?;
        let blank = instance_request(&format!("blank-{node}"), node, &json!({}));
        let blank = text(&session.post(home, "/instances", blank).await?, "uuid")?;
        session.wait_for(via, &format!("/instances/{blank}"), "state", "created").await?;
        session.wait_for(via, &format!("/instances/{guest}"), "agent_state", "ready").await?;
        let (network, counter) = (network.to_owned(), Cell::new(0));
        Ok(Self { session, via, home, network, guest, blank, dead_node, counter })
    }
}

/// Deletes all instances and networks, and waits until they are deleted.
async fn delete_objects(session: &Session) -> Result<(), Problem> {
    for collection in ["instances", "networks"] {
        let records = session.get(0, &format!("/{collection}")).await?;
        let ids = records.as_array().unwrap().iter().filter(|record| record["name"] != "floating");
        let ids: Vec<String> = ids.map(|record| text(record, "uuid")).collect::<Result<_, _>>()?;
        for id in &ids {
            session.act(0, Method::DELETE, &format!("/{collection}/{id}")).await?;
        }
        for id in &ids {
            session.wait_for(0, &format!("/{collection}/{id}"), "state", "deleted").await?;
        }
    }
    Ok(())
}

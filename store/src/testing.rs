//! Shared fixtures of the tests, which run every query on SQLite and on a real MariaDB.

use std::collections::BTreeMap;

use muster_types::blob::{Checksums, ContentDigest, CopyState, ImageFacts, ImageFormat};
use muster_types::capacity::Capacity;
use muster_types::event::{Event, EventType};
use muster_types::ids::{ArtifactId, BlobId, InstanceId, NodeId, StorageId};
use muster_types::instance::{
    ConfigDriveType, DiskSpecRecord, FencingPolicy, InstanceState, MachineType, RestartPolicy, SideChannel,
};
use muster_types::issuer::IssuerTerms;
use muster_types::object::ObjectRef;
use muster_types::operation::{OperationHandle, OperationType};
use muster_types::rule::{ClaimMatcher, RuleTerms};
use muster_types::shared_storage::StorageType;
use muster_types::spec::{DiskBus, DiskSpec, DiskType, VideoSpec};
use muster_types::time::now;
use serde_json::json;

use crate::blobs::NewBlob;
use crate::instances::{InstanceSpec, NewInstance, UnfencedVm};
use crate::keys::{NewKey, StoredSecret};
use crate::operations::NewOperation;
use crate::*;

/// Generates two tests from each function, one for each engine.
macro_rules! on_both_engines {
    ($(async fn $name:ident($store:ident: Arc<Store>) $body:block)+) => {$(
        mod $name {
            use super::*;

            async fn check($store: Arc<Store>) $body

            #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
            async fn sqlite() {
                let folder = tempfile::tempdir().unwrap();
                let url = format!("sqlite:{}", folder.path().join("muster.db").display());
                check(Arc::new(Store::open(&url).await.unwrap())).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
            async fn mariadb() {
                match muster_testing::database_url() {
                    Some(url) => check(Arc::new(Store::open(&url).await.unwrap())).await,
                    None => muster_testing::skipped("mariadb-server"),
                }
            }
        }
    )+};
}
pub(crate) use on_both_engines;

pub(crate) fn key(tag: i64, expiry: Option<f64>) -> NewKey {
    let secret = StoredSecret { tag, hash: format!("hash {tag}"), nonce: format!("nonce {tag}") };
    NewKey { secret, expiry, scopes: None, provenance: None }
}

pub(crate) fn operation(target: &str, depends_on: Vec<OperationHandle>) -> NewOperation {
    NewOperation {
        operation_type: OperationType::Namespace,
        name: "delete_namespace",
        tasks: vec!["one", "two"],
        arguments: json!({"n": 1}),
        depends_on,
        namespace: Some(target.to_owned()),
        target: ObjectRef::namespace(target),
        request_id: Some("request".into()),
        node: None,
        trace: Some("trace".into()),
    }
}

pub(crate) fn event(object: &ObjectRef, event_type: EventType, message: &str, age: f64) -> Event {
    let mut event = Event::new(event_type, object.clone(), message).with("a", "ü");
    event.timestamp = now() - age;
    event.node = "node".into();
    event
}

pub(crate) fn issuer_terms(url: &str) -> IssuerTerms {
    IssuerTerms {
        issuer_url: url.into(),
        jwks_uri: "https://keys.example/ü".into(),
        audience: "cloud".into(),
    }
}

pub(crate) fn rule_terms() -> RuleTerms {
    let bound_claims = BTreeMap::from([
        ("sub".to_owned(), ClaimMatcher::Exact("répo".into())),
        ("ref".to_owned(), ClaimMatcher::AnyOf(vec!["main".into()])),
    ]);
    RuleTerms {
        issuer: "forge".into(),
        bound_claims,
        scopes: vec!["artifact.*".into(), "blob.read".into()],
        key_ttl: 600,
        key_name_prefix: "ci".into(),
    }
}

pub(crate) fn instance_spec() -> InstanceSpec {
    let disk = DiskSpec {
        size: Some(8),
        base: Some("https://a.example/ü".into()),
        bus: DiskBus::Nvme,
        disk_type: DiskType::Disk,
    };
    InstanceSpec {
        cpus: 2,
        memory: 1 << 20,
        disks: vec![DiskSpecRecord { spec: disk, blob_uuid: None }],
        awaited: BTreeMap::from([(0, ArtifactId::new())]),
        video: VideoSpec::default(),
        ssh_key: Some("ssh-rsa ü".into()),
        user_data: Some("x".repeat(1 << 20)),
        uefi: true,
        secure_boot: false,
        configdrive: ConfigDriveType::None,
        nvram_template: Some(BlobId::new()),
        machine_type: MachineType::Q35,
        side_channels: vec![SideChannel::Agent2],
        requested_placement: Some("node".into()),
        disposable: true,
        storage: StorageType::Shared,
        storage_uuid: Some(StorageId::new()),
        has_shared_disks: true,
        replicas: 0,
        restore_from: Some(NodeId::new()),
        restart: RestartPolicy::Elsewhere,
        fencing: Some(FencingPolicy::Own),
        unfenced: Some(UnfencedVm { node: NodeId::new(), until: Some(7.5) }),
    }
}

pub(crate) fn new_instance(name: &str, namespace: &str, node: Option<NodeId>) -> NewInstance {
    NewInstance {
        id: InstanceId::new(),
        name: name.into(),
        namespace: namespace.into(),
        state: InstanceState::Initial,
        error_message: None,
        spec: instance_spec(),
        node,
        committed: Capacity { cpus: 2, memory_mb: 1 << 20, disk_gb: 8 },
    }
}

pub(crate) async fn add_instance(store: &Store, new: &NewInstance) {
    transaction!(store, |tx| { Ok(instances::insert(tx, new).await?) }).unwrap();
}

pub(crate) async fn set_instance_state(
    store: &Store,
    id: InstanceId,
    from: InstanceState,
    to: InstanceState,
) -> bool {
    transaction!(store, |tx| { Ok(instances::set_state(tx, id, from, to, None).await?) }).unwrap()
}

/// Adds an instance in the state `created` on a node.
pub(crate) async fn created_instance(store: &Store, node: NodeId) -> InstanceId {
    use InstanceState as I;
    let new = new_instance("www", "alpha", Some(node));
    add_instance(store, &new).await;
    for (from, to) in [(I::Initial, I::Preflight), (I::Preflight, I::Creating), (I::Creating, I::Created)] {
        assert!(set_instance_state(store, new.id, from, to).await);
    }
    new.id
}

pub(crate) fn content(letter: char) -> ContentDigest {
    let digits = |count| letter.to_string().repeat(count);
    let checksums =
        Checksums { sha1: digits(40), sha256: digits(64), sha512: digits(128), xxh128: digits(32) };
    ContentDigest { size: 5_000_000_000, checksums }
}

pub(crate) fn new_blob(letter: char) -> NewBlob {
    let image = ImageFacts {
        format: ImageFormat::Qcow2,
        compression: None,
        virtual_size: 1 << 40,
        format_details: serde_json::Map::new(),
    };
    NewBlob { id: BlobId::new(), content: content(letter), modified: Some("ü".into()), image: Some(image) }
}

pub(crate) async fn create_blob(store: &Store, new: &NewBlob, node: NodeId) {
    transaction!(store, |tx| {
        blobs::insert(tx, new).await?;
        blob_locations::set(tx, new.id, node, CopyState::Copying).await?;
        blobs::insert_content(tx, &new.content.checksums.sha512, new.id).await?;
        assert!(blobs::set_created(tx, new.id).await?);
        Ok(blob_locations::set(tx, new.id, node, CopyState::Complete).await?)
    })
    .unwrap();
}

//! The state that all parts of the control plane share.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;

use muster_types::event::Event;
use muster_types::ids::{InstanceId, NodeId};
use muster_types::key::Secret;
use muster_types::lock_file::LockFileId;
use muster_types::node::{HostFeature, NodeApi};
use muster_types::settings::Settings;
use muster_types::{Error, Result};
use parking_lot::Mutex;
use tokio::sync::{OwnedRwLockReadGuard, OwnedSemaphorePermit, RwLock, Semaphore};

use crate::auth::Caller;
use crate::auth::console_key::ConsoleKey;
use crate::auth::identity::IdentityVerifier;
use crate::auth::row_cipher::{CipherPurpose, RowCipher};
use crate::auth::secrets::Secrets;
use crate::auth::tokens::AccessTokens;
use crate::daemon_metrics::DaemonMetrics;
use crate::events::{EventBudget, Events};
use crate::health::Health;
use crate::peer::Peers;
use crate::queue::Queue;
use crate::state::{
    AgentNotifier, BlobUses, BlobsInProgress, ClusterChanges, ConsoleSessions, EventFollower, EventStreams,
    InstanceLocks, NetworkNotifier, NodeCache, NodeSilences, OwnedLeases, PlacementCache, StateCountsCache,
    TerminalSessions, UploadLocks,
};
use crate::traces::Traces;
use muster_store::leases::LeaseOwner;
use muster_store::{Store, is_dry_run};

/// The maximum number of concurrent uploads and downloads of one daemon. Each takes some megabytes of memory.
const MAX_TRANSFERS: usize = 256;

/// The control plane of one daemon.
pub struct App {
    pub store: Arc<Store>,
    pub settings: Settings,
    pub events: Events,
    pub event_budget: EventBudget,
    pub metrics: DaemonMetrics,
    pub traces: Arc<Traces>,
    /// The event streams that clients have open.
    pub event_streams: EventStreams,
    /// The seed of the cluster, for backups.
    pub(crate) seed: Secret,
    pub secrets: Secrets,
    pub tokens: AccessTokens,
    /// Encrypts the responses that are kept for repeated requests.
    pub response_cipher: RowCipher,
    /// Encrypts the secrets of webhooks.
    pub(crate) webhook_cipher: RowCipher,
    /// The events that were queued for webhooks, while this daemon is the maintainer.
    pub(crate) webhook_events: tokio::sync::Mutex<Option<EventFollower>>,
    /// Verifies the tokens of trusted issuers.
    pub identities: IdentityVerifier,
    pub health: Arc<Health>,
    pub queue: Queue,
    /// What other daemons changed.
    pub(crate) cluster_changes: ClusterChanges,
    pub(crate) node_cache: NodeCache,
    pub(crate) leases: OwnedLeases,
    /// The nodes that do not check in.
    pub silences: NodeSilences,
    pub networks: NetworkNotifier,
    pub agents: AgentNotifier,
    pub terminal_sessions: TerminalSessions,
    /// The consoles that clients have open.
    pub console_sessions: ConsoleSessions,
    /// The other daemons of the cluster.
    pub peers: Peers,
    transfers: Arc<Semaphore>,
    /// The blobs that this daemon is storing.
    pub blobs_in_progress: BlobsInProgress,
    pub(crate) blob_uses: BlobUses,
    /// The drafts that VMs of this daemon's nodes are writing.
    pub drafts_in_progress: BlobsInProgress,
    pub instance_locks: InstanceLocks,
    pub upload_locks: UploadLocks,
    pub placement: PlacementCache,
    pub(crate) state_counts: StateCountsCache,
    /// Signs the tokens of the console proxy.
    pub console_key: Option<ConsoleKey>,
    /// The nodes that this daemon runs: this host, or simulated ones.
    pub nodes: Vec<Arc<dyn NodeApi>>,
    /// Identifies this process as the owner of leases.
    pub lease_owner: LeaseOwner,
    /// The lock file of the data directory, by which the cluster tells a restarted daemon from a copy.
    pub lock_file: LockFileId,
    /// The limits of this daemon's nodes that were logged.
    pub(crate) limits_logged: Mutex<BTreeSet<HostFeature>>,
    /// Why the shared storage of each of this daemon's nodes cannot be used, if it cannot.
    pub(crate) storage_problems: Mutex<HashMap<NodeId, Option<String>>>,
    /// Why VMs of this daemon's nodes cannot use their disks on shared storage yet.
    pub(crate) storage_waits: Mutex<HashMap<InstanceId, String>>,
    /// Locked for reading by every change in progress.
    changes: Arc<RwLock<()>>,
}

impl fmt::Debug for App {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("App").field("node", &self.lease_owner.node).finish_non_exhaustive()
    }
}

impl App {
    #[must_use]
    pub fn new(
        store: Arc<Store>,
        settings: Settings,
        events: Events,
        seed: &Secret,
        nodes: Vec<Arc<dyn NodeApi>>,
    ) -> Self {
        let node_ids = nodes.iter().map(|node| node.identity().id).collect();
        let traces = Arc::new(Traces::new(&settings, events.node()));
        let console_key = ConsoleKey::load(&settings.kerbside_signing_key, seed);
        Self {
            lease_owner: LeaseOwner::new(events.node()),
            seed: seed.clone(),
            secrets: Secrets::new(seed),
            tokens: AccessTokens::new(seed, &settings.zone, settings.api_token_duration),
            response_cipher: RowCipher::new(seed, CipherPurpose::Responses),
            webhook_cipher: RowCipher::new(seed, CipherPurpose::WebhookSecrets),
            webhook_events: tokio::sync::Mutex::default(),
            identities: IdentityVerifier::new(&settings, &events),
            health: Arc::default(),
            changes: Arc::default(),
            lock_file: LockFileId { boot: uuid::Uuid::new_v4().to_string(), device: 0, inode: 0, host: None },
            limits_logged: Mutex::default(),
            storage_problems: Mutex::default(),
            storage_waits: Mutex::default(),
            event_budget: EventBudget::default(),
            metrics: DaemonMetrics::new(&store.metrics, &traces),
            event_streams: EventStreams::default(),
            queue: Queue::default(),
            cluster_changes: ClusterChanges::default(),
            node_cache: NodeCache::default(),
            leases: OwnedLeases::default(),
            silences: NodeSilences::default(),
            networks: NetworkNotifier::default(),
            agents: AgentNotifier::default(),
            terminal_sessions: TerminalSessions::default(),
            console_sessions: ConsoleSessions::default(),
            peers: Peers::new(Arc::clone(&store), seed.clone(), node_ids, &settings, Arc::clone(&traces)),
            traces,
            transfers: Arc::new(Semaphore::new(MAX_TRANSFERS)),
            blobs_in_progress: BlobsInProgress::default(),
            blob_uses: BlobUses::default(),
            drafts_in_progress: BlobsInProgress::default(),
            instance_locks: InstanceLocks::default(),
            upload_locks: UploadLocks::default(),
            placement: PlacementCache::default(),
            state_counts: StateCountsCache::default(),
            console_key: console_key.unwrap_or_else(|error| {
                tracing::error!(error, "failed to load KERBSIDE_SIGNING_KEY");
                None
            }),
            store,
            settings,
            events,
            nodes,
        }
    }

    /// Sets the identity of the lock file of the data directory.
    #[must_use]
    pub fn with_lock_file(self, lock_file: LockFileId) -> Self {
        Self { lock_file, ..self }
    }

    /// Acquires a slot for one upload or download, until it is dropped.
    pub fn begin_transfer(&self) -> Result<OwnedSemaphorePermit> {
        let too_many = |_| Error::Unavailable("too many concurrent transfers, please retry".into());
        Arc::clone(&self.transfers).try_acquire_owned().map_err(too_many)
    }

    /// Marks a change as in progress until the guard is dropped.
    pub async fn begin_change(&self) -> OwnedRwLockReadGuard<()> {
        Arc::clone(&self.changes).read_owned().await
    }

    /// Waits until no change is in progress.
    pub async fn changes_ended(&self) {
        drop(self.changes.write().await);
    }

    /// Records an event that a request caused, unless the request is a dry run.
    pub fn record(&self, caller: &Caller, mut event: Event) {
        if is_dry_run() {
            return;
        }
        event.request_id = Some(caller.request_id.clone());
        event.namespace = Some(caller.namespace.clone());
        self.events.record(event);
    }
}

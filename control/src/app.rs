//! What every part of the control plane is given: the store, the settings, the events, the keys.

use std::fmt;
use std::sync::Arc;

use muster_types::event::Event;
use muster_types::key::Secret;
use muster_types::node::NodeApi;
use muster_types::settings::Settings;
use muster_types::{Error, Result};
use tokio::sync::{OwnedRwLockReadGuard, OwnedSemaphorePermit, RwLock, Semaphore};

use crate::auth::Caller;
use crate::auth::console_key::ConsoleKey;
use crate::auth::identity::Identities;
use crate::auth::secrets::Secrets;
use crate::auth::tokens::Tokens;
use crate::events::Events;
use crate::health::Health;
use crate::objects::blob::Making;
use crate::objects::instance::placement::Known;
use crate::objects::instance::turns::Turns;
use crate::operations::Queue;
use crate::reconcile::agent_operations;
use crate::reconcile::networks::Bell;
use crate::store::Store;
use crate::store::leases::Holder;

/// Contents that one daemon moves at once.
const MOST_TRANSFERS: usize = 256;

/// The control plane of one daemon.
pub struct App {
    pub store: Arc<Store>,
    pub settings: Settings,
    pub events: Events,
    pub secrets: Secrets,
    pub tokens: Tokens,
    /// Verifies the tokens of trusted issuers.
    pub identities: Identities,
    pub health: Health,
    pub queue: Queue,
    /// Between those who change networks and those who follow.
    pub networks: Bell,
    /// Between those who want something done inside guests and those who do it.
    pub agents: agent_operations::Bell,
    /// Room for contents on their way in or out: each takes some megabytes while it moves.
    transfers: Arc<Semaphore>,
    /// The blobs that this daemon is making.
    pub making: Making,
    /// The drafts that machines of this daemon's nodes are writing.
    pub drafting: Making,
    /// Who is at the machine of which instance.
    pub turns: Turns,
    /// What is known of the nodes by those who place instances.
    pub placement: Known,
    /// Signs the tokens of the console proxy.
    pub console_key: Option<ConsoleKey>,
    /// The nodes that this daemon speaks for: this machine, or simulated ones.
    pub nodes: Vec<Arc<dyn NodeApi>>,
    /// This process, as leases name it.
    pub holder: Holder,
    /// Held for reading by every change under way.
    busy: Arc<RwLock<()>>,
}

impl fmt::Debug for App {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("App").field("node", &self.holder.node).finish_non_exhaustive()
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
        let console_key = ConsoleKey::load(&settings.kerbside_signing_key, seed);
        Self {
            holder: Holder::new(events.node()),
            secrets: Secrets::new(seed),
            tokens: Tokens::new(seed, &settings.zone, settings.api_token_duration),
            identities: Identities::new(&settings),
            health: Health::default(),
            busy: Arc::default(),
            queue: Queue::default(),
            networks: Bell::default(),
            agents: agent_operations::Bell::default(),
            transfers: Arc::new(Semaphore::new(MOST_TRANSFERS)),
            making: Making::default(),
            drafting: Making::default(),
            turns: Turns::default(),
            placement: Known::default(),
            console_key: console_key.unwrap_or_else(|error| {
                tracing::error!(error, "KERBSIDE_SIGNING_KEY cannot be used");
                None
            }),
            store,
            settings,
            events,
            nodes,
        }
    }

    /// Room for one content on its way, until it is dropped.
    pub(crate) fn begin_transfer(&self) -> Result<OwnedSemaphorePermit> {
        let full = |_| Error::Unavailable("too many contents are on their way, please retry".into());
        Arc::clone(&self.transfers).try_acquire_owned().map_err(full)
    }

    /// Marks a change as under way until the guard is dropped.
    pub(crate) async fn begin_change(&self) -> OwnedRwLockReadGuard<()> {
        Arc::clone(&self.busy).read_owned().await
    }

    /// Waits until no change is under way.
    pub async fn changes_ended(&self) {
        drop(self.busy.write().await);
    }

    /// Records an event that a request caused.
    pub fn record(&self, caller: &Caller, mut event: Event) {
        event.request_id = Some(caller.request_id.clone());
        self.events.record(event);
    }
}

//! `/networks`.

use std::net::Ipv4Addr;

use muster_types::address::AddressRecord;
use muster_types::ids::NetworkId;
use muster_types::interface::InterfaceRecord;
use muster_types::network::{NetworkRecord, PingResult};
use muster_types::operation::{OperationHandle, OperationRecord};
use reqwest::{Method, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Answer, Client, Result, path, with_query};

/// A network to make.
#[derive(Debug, Clone, Serialize)]
pub struct NewNetwork {
    pub name: String,
    pub netblock: String,
    pub provide_dhcp: bool,
    pub provide_nat: bool,
    pub provide_dns: bool,
    /// The caller's own when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

/// A network that is being deleted.
#[derive(Debug, Clone, Deserialize)]
pub struct NetworkDeletion {
    pub network_uuid: NetworkId,
    #[serde(flatten)]
    pub operation: OperationHandle,
}

/// What became of deleting every network of a namespace.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub enum DeletedNetworks {
    /// Every network is being deleted.
    All(Vec<NetworkDeletion>),
    /// Some have interfaces and were left.
    Partly { deleted: Vec<NetworkDeletion>, unable: Vec<NetworkId> },
}

impl Client {
    /// The networks that can be seen, on request with those that are deleted.
    pub async fn networks(&self, all: bool) -> Result<Answer<Vec<NetworkRecord>>> {
        self.get(with_query(path(&["networks"])?, &[("all", all.then_some("true"))])).await
    }

    /// One network by name or id.
    pub async fn network(&self, network: &str) -> Result<Answer<NetworkRecord>> {
        self.get(path(&["networks", network])?).await
    }

    /// Makes a network. It is usable once its state is `created`.
    pub async fn create_network(&self, new: &NewNetwork) -> Result<Answer<NetworkRecord>> {
        self.call(Method::POST, path(&["networks"])?, Some(json!(new))).await
    }

    /// Deletes a network. The answer points at the operation that does it.
    pub async fn delete_network(&self, network: &str) -> Result<Answer<OperationHandle>> {
        self.delete(path(&["networks", network])?).await
    }

    /// Deletes every network of a namespace, also those with interfaces if they are to be waited for.
    pub async fn delete_networks(
        &self,
        namespace: Option<&str>,
        clean_wait: bool,
    ) -> Result<Answer<DeletedNetworks>> {
        let body = json!({ "confirm": true, "namespace": namespace, "clean_wait": clean_wait });
        let reply = self.ask(Method::DELETE, &path(&["networks"])?, Some(body)).await?;
        if reply.status == StatusCode::FORBIDDEN {
            let json: Value = serde_json::from_slice(&reply.body).unwrap_or_default();
            // Half a success: the reason says what was done.
            if let Some(outcome) = json.get("error").filter(|error| error.is_object()) {
                return Ok(Answer::new(outcome.clone()));
            }
        }
        self.answer(&reply)
    }

    /// The interfaces on a network.
    pub async fn network_interfaces(&self, network: &str) -> Result<Answer<Vec<InterfaceRecord>>> {
        self.get(path(&["networks", network, "interfaces"])?).await
    }

    /// The addresses of a network that are not free.
    pub async fn network_addresses(&self, network: &str) -> Result<Answer<Vec<AddressRecord>>> {
        self.get(path(&["networks", network, "addresses"])?).await
    }

    /// Keeps an address from being given to anyone.
    pub async fn reserve_address(
        &self,
        network: &str,
        address: &str,
        comment: Option<&str>,
    ) -> Result<Answer<AddressRecord>> {
        let body = json!({ "comment": comment });
        self.call(Method::POST, path(&["networks", network, "addresses", address])?, Some(body)).await
    }

    /// Ends a reservation by hand.
    pub async fn release_address(&self, network: &str, address: &str) -> Result<Answer<()>> {
        self.delete(path(&["networks", network, "addresses", address])?).await
    }

    /// Pings an address from the network's router.
    pub async fn ping(&self, network: &str, address: &str) -> Result<Answer<PingResult>> {
        self.get(path(&["networks", network, "ping", address])?).await
    }

    /// Routes an address of the floating network to this one.
    pub async fn route_address(&self, network: &str) -> Result<Answer<Ipv4Addr>> {
        self.call(Method::POST, path(&["networks", network, "route"])?, None).await
    }

    /// Takes a routed address back.
    pub async fn unroute_address(&self, network: &str, address: &str) -> Result<Answer<()>> {
        self.delete(path(&["networks", network, "route", address])?).await
    }

    /// Tells the network's resolver a name, or another address for it.
    pub async fn set_network_name(&self, network: &str, name: &str, address: &str) -> Result<Answer<()>> {
        let body = json!({ "name": name, "value": address });
        self.call(Method::POST, path(&["networks", network, "dns"])?, Some(body)).await
    }

    /// Makes the network's resolver forget a name.
    pub async fn delete_network_name(&self, network: &str, name: &str) -> Result<Answer<()>> {
        self.delete(with_query(path(&["networks", network, "dns"])?, &[("name", Some(name))])).await
    }

    /// The operations on a network, newest first: those that have not ended, or all.
    pub async fn network_operations(&self, network: &str, all: bool) -> Result<Answer<Vec<OperationRecord>>> {
        let path = path(&["networks", network, "clusteroperations"])?;
        self.get(with_query(path, &[("all", all.then_some("true"))])).await
    }
}

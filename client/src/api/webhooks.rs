//! `/auth/namespaces/{namespace}/webhooks`.

use muster_types::webhook::{DeliveryRecord, WebhookRecord};
use reqwest::Method;
use serde_json::{Value, json};

use super::client::Client;
use super::error::Result;
use super::lists::ListQuery;
use super::response::ApiResponse;
use super::uri::path;

impl Client {
    /// Lists the webhooks of a namespace by name.
    pub async fn webhooks(
        &self,
        namespace: &str,
        query: &ListQuery,
    ) -> Result<ApiResponse<Vec<WebhookRecord>>> {
        self.get_list(path(&["auth", "namespaces", namespace, "webhooks"])?, query).await
    }

    /// Returns a webhook.
    pub async fn webhook(&self, namespace: &str, name: &str) -> Result<ApiResponse<WebhookRecord>> {
        self.get(path(&["auth", "namespaces", namespace, "webhooks", name])?).await
    }

    /// Creates a webhook with these terms. The response has its secret.
    pub async fn create_webhook(
        &self,
        namespace: &str,
        name: &str,
        mut terms: Value,
    ) -> Result<ApiResponse<WebhookRecord>> {
        terms["name"] = name.into();
        self.call(Method::POST, path(&["auth", "namespaces", namespace, "webhooks"])?, Some(terms)).await
    }

    /// Replaces all terms of a webhook.
    pub async fn update_webhook(
        &self,
        namespace: &str,
        name: &str,
        terms: Value,
    ) -> Result<ApiResponse<WebhookRecord>> {
        let path = path(&["auth", "namespaces", namespace, "webhooks", name])?;
        self.call(Method::PUT, path, Some(terms)).await
    }

    /// Deletes a webhook.
    pub async fn delete_webhook(&self, namespace: &str, name: &str) -> Result<ApiResponse<WebhookRecord>> {
        self.delete(path(&["auth", "namespaces", namespace, "webhooks", name])?).await
    }

    /// Replaces the secret of a webhook. The previous one stays valid for some seconds.
    pub async fn rotate_webhook_secret(
        &self,
        namespace: &str,
        name: &str,
        overlap: i64,
    ) -> Result<ApiResponse<WebhookRecord>> {
        let path = path(&["auth", "namespaces", namespace, "webhooks", name, "rotate-secret"])?;
        self.call(Method::POST, path, Some(json!({ "overlap": overlap }))).await
    }

    /// Queues a delivery that tests the receiver.
    pub async fn test_webhook(&self, namespace: &str, name: &str) -> Result<ApiResponse<DeliveryRecord>> {
        let path = path(&["auth", "namespaces", namespace, "webhooks", name, "test"])?;
        self.call(Method::POST, path, None).await
    }

    /// Lists the deliveries of a webhook, newest first.
    pub async fn webhook_deliveries(
        &self,
        namespace: &str,
        name: &str,
        query: &ListQuery,
    ) -> Result<ApiResponse<Vec<DeliveryRecord>>> {
        self.get_list(path(&["auth", "namespaces", namespace, "webhooks", name, "deliveries"])?, query).await
    }

    /// Sends a delivery again.
    pub async fn redeliver(
        &self,
        namespace: &str,
        name: &str,
        delivery: &str,
    ) -> Result<ApiResponse<DeliveryRecord>> {
        let parts = ["auth", "namespaces", namespace, "webhooks", name, "deliveries", delivery, "redeliver"];
        self.call(Method::POST, path(&parts)?, None).await
    }
}

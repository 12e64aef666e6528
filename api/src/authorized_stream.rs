//! Connections that end when their client may not use them any longer. See docs/decisions/0080.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use muster_control::state::ConsoleSession;

/// Why a console ends.
pub(crate) const SESSION_ENDED: &str = "the key or the session of the client has ended";

/// The connection to a console. Reading and writing fail when the key or the browser session of the client has ended: a relay
/// whose client does not read may only write.
pub(crate) struct AuthorizedStream<S> {
    stream: S,
    ended: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl<S> AuthorizedStream<S> {
    pub(crate) fn new(stream: S, session: ConsoleSession) -> Self {
        Self { stream, ended: Box::pin(session.ended()) }
    }

    /// Returns an error if the client may not use the console any longer. The readers and the writers of a connection belong to
    /// one task, which is notified when that changes.
    fn require_authorized(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.ended.as_mut().poll(cx).is_pending() {
            return Ok(());
        }
        // A future must not be polled after it is ready.
        self.ended = Box::pin(std::future::ready(()));
        Err(io::Error::new(io::ErrorKind::PermissionDenied, SESSION_ENDED))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for AuthorizedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.require_authorized(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AuthorizedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &[u8]) -> Poll<io::Result<usize>> {
        self.require_authorized(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, buffer)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn nothing_is_read_or_written_after_the_session_has_ended() {
        let (mut console, stream) = tokio::io::duplex(64);
        let (end, ended) = oneshot::channel::<()>();
        let mut stream = AuthorizedStream { stream, ended: Box::pin(async { drop(ended.await) }) };
        stream.write_all(b"in").await.unwrap();
        console.write_all(b"out").await.unwrap();
        stream.read_exact(&mut [0; 1]).await.unwrap();
        end.send(()).unwrap();
        for _ in 0..2 {
            let refused = stream.write_all(b"late").await.unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
            let refused = stream.read(&mut [0; 8]).await.unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        }
        drop(stream);
        let mut received = Vec::new();
        console.read_to_end(&mut received).await.unwrap();
        assert_eq!(received, b"in");
    }
}
